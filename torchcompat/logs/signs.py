"""Which hazards a failure shows: the signs of all patches and hazards, tried on events."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torchcompat.errors import PluginError
from torchcompat.logs.streams import Event, Part, Stack
from torchcompat.patch import Patch
from torchcompat.plugins import Registered
from torchcompat.sign import Frame, Hazard, Sign

log = logging.getLogger("torchcompat")

# What the tracebacks of all threads but the main one begin with.
_THREADS: Final = (
    Frame.parse("threading.py:_bootstrap|_bootstrap_inner|run"),
    Frame.parse("concurrent/futures/thread.py:run|_worker"),
)


@dataclass(frozen=True)
class Known:
    """A hazard: with its patch, or with what else to do about it."""

    id: str
    title: str
    signs: tuple[Sign, ...]
    patch: Patch | None = None
    advice: str = ""

    def to_dict(self) -> dict[str, str | None]:
        """A hazard without a patch, for programs."""
        return {"id": self.id, "title": self.title, "patch": None, "advice": self.advice}

    def __str__(self) -> str:
        return f"{self.id}: {self.title}\n\nThere is no patch for it yet. {self.advice}"


@dataclass(frozen=True)
class Match:
    """One sign found. `sure` takes into account what the log left out."""

    hazard: str
    sign: Sign
    sure: bool
    message: str


def known_hazards(patches: Mapping[str, Registered]) -> dict[str, Known]:
    """Everything with signs, by id: patches, and the `HAZARDS` of the modules that bring patches.

    Raises `PluginError` for `HAZARDS` that holds anything else.
    """
    known = {i: Known(i, r.patch.title, r.patch.signs, r.patch) for i, r in patches.items()}
    for package in dict.fromkeys(r.package for r in patches.values()):
        for hazard in getattr(sys.modules.get(package), "HAZARDS", ()):
            if not isinstance(hazard, Hazard):
                raise PluginError(f"{package}.HAZARDS: {hazard!r} is no torchcompat Hazard")
            before = known.get(hazard.id)
            if before is None:
                known[hazard.id] = Known(hazard.id, hazard.title, hazard.signs, None, hazard.advice)
            else:
                known[hazard.id] = replace(before, signs=before.signs + hazard.signs)
    return known


class Signs:
    """All signs, ready to be tried."""

    def __init__(self, known: Iterable[Known]) -> None:
        self._by_kind: dict[str, list[tuple[str, Sign]]] = {"error": [], "log": [], "dump": []}
        for hazard in known:
            for sign in hazard.signs:
                try:
                    sign.pattern  # noqa: B018 - compiled here and now
                except ValueError as e:  # of one plugin: the others are still good
                    log.warning("%s: %s", hazard.id, e)
                    continue
                self._by_kind[sign.kind].append((hazard.id, sign))

    @property
    def loose(self) -> tuple[str, ...]:
        """What says something also outside a traceback, as plain text."""
        return _literals(s for _, s in self._by_kind["error"] if not s.needs_stack)

    @property
    def records(self) -> tuple[str, ...]:
        return _literals(s for _, s in self._by_kind["log"])

    @property
    def elsewhere(self) -> tuple[str, ...]:
        every = (sign for signs in self._by_kind.values() for _, sign in signs)
        return tuple(dict.fromkeys(s.elsewhere for s in every if s.elsewhere))

    def match(self, event: Event) -> list[Match]:
        """What the event shows. Where something is sure, what only may be is left out."""
        found: dict[tuple[str, int], Match] = {}
        for hazard, sign in self._by_kind[event.kind]:
            for part in event.parts:
                if sign.literal not in part.text:
                    continue
                sure = _fits_dump(sign, part) if sign.kind == "dump" else _fits(sign, part)
                if sure is None or (sign.in_thread and not _in_thread(event, part)):
                    continue
                match = Match(hazard, sign, sure and sign.sure, part.title or event.describe())
                if (hazard, id(sign)) not in found or match.sure:
                    found[hazard, id(sign)] = match
        matches = list(found.values())
        certain = [m for m in matches if m.sure and not m.sign.elsewhere]
        return _once_each(certain or matches)


def _in_thread(event: Event, part: Part) -> bool:
    """Whether it happened in a thread that is not the main one, as far as the log says."""
    if event.thread and event.thread != "MainThread":
        return True
    return any(_in_stack(place, stack) for place in _THREADS for stack in part.stacks)


def _once_each(matches: list[Match]) -> list[Match]:
    """One match for each hazard, the surest."""
    best: dict[str, Match] = {}
    for match in matches:
        if match.hazard not in best or (match.sure and not best[match.hazard].sure):
            best[match.hazard] = match
    return list(best.values())


def _literals(signs: Iterable[Sign]) -> tuple[str, ...]:
    """The plain texts to look for, without those that contain another one."""
    texts = sorted({sign.literal for sign in signs}, key=len)
    kept: list[str] = []
    for text in texts:
        if not any(shorter in text for shorter in kept):
            kept.append(text)
    return tuple(kept)


def _fits(sign: Sign, part: Part) -> bool | None:
    """Whether it fits for sure; None if it does not."""
    if not sign.pattern.search(part.text):
        return None
    if not part.stacks:
        return None if sign.needs_stack else not sign.absent
    if not _fits_stack(sign, part.stacks[0]):
        return None
    return part.whole or not sign.absent


def _fits_dump(sign: Sign, part: Part) -> bool | None:
    if not sign.pattern.search(part.text):
        return None
    for stack in part.stacks:
        if _fits_stack(sign, stack) and (not sign.others or any(_others(sign, stack, part.stacks))):
            return True
    return None


def _others(sign: Sign, mine: Stack, stacks: Iterable[Stack]) -> Iterator[bool]:
    for other in stacks:
        if other is not mine:
            yield all(_in_stack(place, other) for place in sign.others)


def _fits_stack(sign: Sign, stack: Stack) -> bool:
    innermost = sign.innermost
    if innermost and not (stack.innermost and innermost.fits(*stack.innermost)):
        return False
    if sign.source and stack.source and sign.source not in stack.source:
        return False
    if not all(_in_stack(place, stack) for place in sign.places):
        return False
    return not any(_in_stack(place, stack) for place in sign.excluded)


def _in_stack(place: Frame, stack: Stack) -> bool:
    return any(place.fits(file, function) for file, function in stack.frames)
