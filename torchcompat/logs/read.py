"""Read a whole log, in one pass and in bounded memory, into what it tells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchcompat.logs.context import HINTS, Context
from torchcompat.logs.lines import read_line
from torchcompat.logs.signs import Known, Match, Signs
from torchcompat.logs.streams import HEADER, Assembler, Event
from torchcompat.sign import Sign

_OPENINGS: Final = (
    HEADER,
    'File "',
    "Fatal Python error",
    "most recent call first",
    "Timeout (",
    "(idle",
    "(active",
)
_UNKNOWN_MAX: Final = 200  # kinds that are told apart
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
class Findings:
    """What a log tells. `unknown` by text; `more_unknown` counts those beyond the kinds kept."""

    lines: int
    context: Context
    hazards: dict[str, Tally]
    unknown: list[Tally]
    more_unknown: int


class LogReader:
    """Feed it blocks of whole lines, then ask for the findings."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._signs = Signs(known.values())
        self._context = Context(frozenset(i for i, k in known.items() if k.patch is not None))
        self._assembler = Assembler(self._take, self._signs.loose, self._signs.records)
        texts = (*self._signs.loose, *self._signs.records, *_OPENINGS)
        self._wanted = tuple(text.encode() for text in dict.fromkeys(texts))
        self._elsewhere = {text.encode() for text in self._signs.elsewhere}
        self._seen: set[str] = set()
        self._tallies: dict[tuple[str, int], tuple[Sign, str, Tally]] = {}
        self._unknown: dict[str, Tally] = {}
        self._more_unknown = 0
        self._number = 0
        self._before = b""

    def feed(self, block: bytes) -> None:
        """Some whole lines."""
        for text in [t for t in self._elsewhere if t in block]:
            self._seen.add(text.decode())
            self._elsewhere.discard(text)
        wanted = [text for text in self._wanted if text in block]
        hints = [text for text in HINTS if text in block]
        if not wanted and not hints and not self._assembler.is_open:
            self._number += block.count(b"\n") or 1
            self._before = b""
            return
        lines = block.split(b"\n")
        if not lines[-1]:
            lines.pop()
        self._lines(lines, wanted, hints)

    def _lines(self, lines: Sequence[bytes], wanted: list[bytes], hints: list[bytes]) -> None:
        number, before = self._number, self._before
        assembler, context = self._assembler, self._context
        for raw in lines:
            number += 1
            if any(text in raw for text in hints):
                context.look(number, read_line(number, raw).text)
            if assembler.is_open or any(text in raw for text in wanted):
                assembler.feed(number, raw, before)
            before = raw
        self._number, self._before = number, before

    def findings(self) -> Findings:
        """The log is over: what it told."""
        self._assembler.end()
        hazards: dict[str, Tally] = {}
        unknown = dict(self._unknown)
        for sign, hazard, tally in self._tallies.values():
            if sign.elsewhere and sign.elsewhere not in self._seen:
                _merge(unknown, _kind(tally.message), tally)
            else:
                _merge(hazards, hazard, tally)
        ordered = sorted(unknown.values(), key=lambda t: t.number)
        return Findings(self._number, self._context, hazards, ordered, self._more_unknown)

    def _take(self, event: Event) -> None:
        matches = self._signs.match(event)
        for match in matches:
            self._count(event, match)
        if not matches and event.in_full:
            self._count_unknown(event)

    def _count(self, event: Event, match: Match) -> None:
        key = (match.hazard, id(match.sign))
        entry = self._tallies.get(key)
        if entry is None:
            tally = Tally(match.message, event.number, event.who, event.thread, sure=match.sure)
            entry = self._tallies[key] = (match.sign, match.hazard, tally)
        entry[2].sure |= match.sure
        entry[2].add(event)

    def _count_unknown(self, event: Event) -> None:
        message = describe(event)
        kind = _kind(message)
        tally = self._unknown.get(kind)
        if tally is None:
            if len(self._unknown) >= _UNKNOWN_MAX:
                self._more_unknown += 1
                return
            tally = Tally(message, event.number, event.who, event.thread)
            self._unknown[kind] = tally
        tally.add(event)


def describe(event: Event) -> str:
    """What an event is, in one line."""
    last = event.parts[-1]
    if last.title:
        return last.title
    if event.kind == "dump":
        return f"a dump of the stacks of {len(last.stacks)} threads"
    innermost = last.stacks[0].innermost if last.stacks else None
    at = f"; its last frame is {innermost[1]} in {innermost[0]}" if innermost else ""
    return f"a traceback that ends before its exception{at}"


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
    """All of it."""
    reader = LogReader(known)
    for block in blocks:
        reader.feed(block)
    return reader.findings()
