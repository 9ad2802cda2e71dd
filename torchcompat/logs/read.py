"""Read a whole log, in one pass and in bounded memory, into what it tells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Final

from torchcompat.build import TorchBuild
from torchcompat.logs.context import HINTS, Context
from torchcompat.logs.lines import CutShort, read_line
from torchcompat.logs.signs import Known, Match, Signs
from torchcompat.logs.streams import HEADER, Assembler, Event

_OPENINGS: Final = (
    HEADER,
    'File "',
    "Fatal Python error",
    "most recent call first",
    "Timeout (",
    '): "MainThread"',  # py-spy dump
)
_KINDS_MAX: Final = 200  # of failures that are told apart
_STREAMS_TOLD: Final = 20
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass
class Tally:
    """One hazard, or one unknown failure: how often, where first, and what it said there."""

    message: str
    number: int
    who: str
    thread: str
    count: int = 0
    sure: bool = True
    streams: Counter[str] = field(default_factory=Counter)

    def add(self, event: Event) -> None:
        self.count += 1
        where = place(event.who, event.thread)
        if where and (where in self.streams or len(self.streams) < _STREAMS_TOLD):
            self.streams[where] += 1


@dataclass
class _Group:
    """Events that show the same signs, or none and the same text."""

    matches: list[Match]
    tally: Tally
    in_full: bool


@dataclass
class Findings:
    """What a log tells. `unknown` by text; `more_unknown` counts those beyond the kinds kept; `cut`
    says why there may be more."""

    lines: int
    context: Context
    hazards: dict[str, Tally]
    unknown: list[Tally]
    more_unknown: int
    cut: str = ""


class LogReader:
    """Feed it blocks of whole lines, then ask for the findings."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = known
        self._signs = Signs(known.values())
        self._context = Context(frozenset(i for i, k in known.items() if k.patch is not None))
        self._assembler = Assembler(self._take, self._signs.loose, self._signs.records)
        texts = [t.encode() for t in (*self._signs.loose, *self._signs.records, *_OPENINGS)]
        self._wanted = tuple(dict.fromkeys([*texts, *HINTS]))
        self._elsewhere = {text.encode() for text in self._signs.elsewhere}
        self._seen: set[str] = set()
        self._groups: dict[object, _Group] = {}
        self._more_unknown = 0
        self._number = 0
        self._before = b""

    @property
    def lines(self) -> int:
        """How many there were so far."""
        return self._number

    def feed(self, block: bytes) -> None:
        """Some whole lines. Of those that cannot matter only the newlines are counted."""
        for text in [t for t in self._elsewhere if t in block]:
            self._seen.add(text.decode())
            self._elsewhere.discard(text)
        ahead = [(at, text) for text in self._wanted if (at := block.find(text)) >= 0]
        heapify(ahead)
        number, before, at = self._number, self._before, 0
        while at < len(block):
            if not self._assembler.is_open and not self._context.is_open(number):
                start = _next_line(block, at, ahead)
                number += block.count(b"\n", at, start)
                if start > at:
                    before = block[block.rfind(b"\n", at, start - 1) + 1 or at : start - 1]
                at = start
                if at == len(block):
                    number += not block.endswith(b"\n")
                    break
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            number += 1
            raw = block[at:end]
            line = read_line(number, raw)
            self._context.look(number, line.text)
            self._assembler.feed(line, before)
            before, at = raw, end + 1
        self._number, self._before = number, before

    def findings(self) -> Findings:
        """The log is over: what it told."""
        self._assembler.end()
        version = self._context.version
        build = None if version is None else TorchBuild.of(version)
        hazards: dict[str, Tally] = {}
        unknown: dict[str, Tally] = {}
        for group in self._groups.values():
            held = [m for m in group.matches if self._holds(m, build)]
            for match in held:
                tally = replace(group.tally, message=match.message, sure=match.sure)
                _merge(hazards, match.hazard, tally)
            if not held and group.in_full:
                _merge(unknown, _kind(group.tally.message), group.tally)
        ordered = sorted(unknown.values(), key=lambda t: t.number)
        return Findings(self._number, self._context, hazards, ordered, self._more_unknown)

    def _holds(self, match: Match, build: TorchBuild | None) -> bool:
        """Whether the rest of the log agrees. What only may be is not, in a torch that the
        hazard's patch is not for."""
        elsewhere, patch = match.sign.elsewhere, self._known[match.hazard].patch
        if elsewhere and elsewhere not in self._seen:
            return False
        if match.sure or patch is None or build is None:
            return True
        return build.place(patch.affects) == "inside"

    def _take(self, event: Event) -> None:
        """Count an event with those that show the same."""
        matches = self._signs.match(event)
        if not matches and not event.in_full:
            return
        message = event.describe()
        signs = tuple((m.hazard, id(m.sign), m.sure) for m in matches)
        key = (event.in_full, signs, "" if signs else _kind(message))
        group = self._groups.get(key)
        if group is None:
            if not matches and len(self._groups) >= _KINDS_MAX:
                self._more_unknown += 1
                return
            tally = Tally(message, event.number, event.who, event.thread)
            group = self._groups[key] = _Group(matches, tally, event.in_full)
        group.tally.add(event)


def _next_line(block: bytes, at: int, ahead: list[tuple[int, bytes]]) -> int:
    """Where the next line begins that has one of the texts, from `at` on; the block's end if none
    has. `ahead` is a heap of places of texts, and is brought up to date."""
    while ahead and ahead[0][0] < at:
        _, text = heappop(ahead)
        if (found := block.find(text, at)) >= 0:
            heappush(ahead, (found, text))
    if not ahead:
        return len(block)
    return block.rfind(b"\n", at, ahead[0][0]) + 1 or at


def place(who: str, thread: str) -> str:
    """Rank or worker and thread, as far as the log says."""
    return ", ".join(filter(None, (who, f"thread {thread}" if thread else "")))


def _kind(message: str) -> str:
    return _NUMBERS.sub("#", message)[:300]


def _merge(into: dict[str, Tally], key: str, tally: Tally) -> None:
    """Two tallies of one thing: the earlier place, the sure message."""
    other = into.get(key)
    if other is None:
        into[key] = tally
        return
    best = min(other, tally, key=lambda t: (not t.sure, t.number))
    early = min(other, tally, key=lambda t: t.number)
    into[key] = Tally(
        best.message,
        early.number,
        early.who,
        early.thread,
        other.count + tally.count,
        best.sure,
        other.streams + tally.streams,
    )


def read_blocks(known: Mapping[str, Known], blocks: Iterable[bytes]) -> Findings:
    """All of it, or all that can be read; raises `CutShort` if that is nothing."""
    reader = LogReader(known)
    try:
        for block in blocks:
            reader.feed(block)
    except CutShort as e:
        if not reader.lines:
            raise
        return replace(reader.findings(), cut=str(e))
    return reader.findings()
