"""`torchcompat explain LOG`: what each known failure in a log is, and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchcompat.build import TorchBuild, find_build
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError, nearest
from torchcompat.logs.context import Context
from torchcompat.logs.lines import blocks, open_log
from torchcompat.logs.read import Findings, Tally, place, read_blocks
from torchcompat.logs.signs import Known, known_hazards
from torchcompat.verdict import State

_STREAMS_SHOWN: Final = 4
_MESSAGE_WIDTH: Final = 300
_APPLIED: Final = frozenset({State.APPLIED, State.OK, State.DISPLACED})


@dataclass(frozen=True)
class Judged:
    """One hazard of a log: whether a patch covers it in that torch, and whether it was applied.

    `covered` is None for a hazard without a patch, `applied` where the log does not say.
    """

    known: Known
    tally: Tally
    covered: bool | None
    coverage: str
    applied: bool | None
    application: str
    next: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.known.id,
            "title": self.known.title,
            "sure": self.tally.sure,
            "covered": self.covered,
            "coverage": self.coverage,
            "applied": self.applied,
            "application": self.application,
            "next": self.next,
            **_tally(self.tally),
        }


def is_log(argument: str | None) -> bool:
    """Whether `explain` was given a log: a file, `-`, or nothing with something piped in."""
    if argument is None:
        return not sys.stdin.isatty()
    return argument == "-" or Path(argument).is_file()


def check_argument(argument: str | None, known: Mapping[str, Known]) -> None:
    """Raises `ConfigError` for what is neither a log nor an id."""
    if argument is None:
        raise ConfigError("explain what? give a patch's id, a log file, or a log on standard input")
    if argument not in known:
        reason = "a folder" if Path(argument).is_dir() else "no such file, and no patch of that id"
        raise ConfigError(f"{argument!r}: {reason}; {nearest(argument, known)}")


def hazards() -> dict[str, Known]:
    """All hazards that are known here, by id. Raises `ConfigError` for settings that mean
    nothing and `PluginError` for a plugin's hazards that are none."""
    return known_hazards(ENGINE.catalog().patches)


def explain_log(name: str, as_json: bool) -> int:
    """Print what the log tells; the exit status. Raises `ConfigError` if it cannot be read."""
    known = hazards()
    with open_log(name) as stream:
        found = read_blocks(known, blocks(stream, name))
    version = found.context.version
    build = find_build() if version is None else TorchBuild.of(version)
    judged = [
        _judge(known[i], tally, found.context, build)
        for i, tally in sorted(found.hazards.items(), key=lambda item: item[1].number)
    ]
    if as_json:
        print(json.dumps(_to_dict(name, found, build, judged), indent=2))
    else:
        print("\n".join(_lines(name, found, build, judged)))
    return int(bool(judged or found.unknown))


def _judge(known: Known, tally: Tally, context: Context, build: TorchBuild | None) -> Judged:
    if known.patch is None:
        no_patch = "there is no patch for it yet"
        return Judged(known, tally, None, no_patch, None, "", known.advice)
    covered, coverage = _coverage(known, build)
    applied, application = _application(known.id, context)
    if covered and not applied:
        steps = (
            f"call torchcompat.apply() before the first torch.compile; "
            f"`python -m torchcompat repro {known.id}` shows the fault without and with the patch"
        )
    elif covered:
        steps = (
            f"it should not have happened: run `python -m torchcompat repro {known.id}` with that "
            "torch, and report it with this log"
        )
    else:
        steps = f"`python -m torchcompat explain {known.id}` with that torch says what it has"
    return Judged(known, tally, covered, coverage, applied, application, steps)


def _coverage(known: Known, build: TorchBuild | None) -> tuple[bool, str]:
    patch = known.patch
    assert patch is not None
    if build is None:
        return False, "no torch is installed here to judge for"
    where = build.place(patch.affects)
    if where == "inside":
        named = " (opt-in: name it)" if patch.opt_in else ""
        return True, f"patch {patch.id} mends it in torch {build.version}{named}"
    if where == "above" and patch.fixed_in is not None:
        return False, f"torch {build.version} should have it fixed (since {patch.fixed_in})"
    return False, f"no patch in torch {build.version}: {patch.id} is for {patch.affects}"


def _application(patch: str, context: Context) -> tuple[bool | None, str]:
    stood = context.stood.get(patch)
    if stood is not None:
        reason = f" ({stood.reason})" if stood.reason else ""
        said = f"the log says {stood.state}{reason}, line {stood.number}"
        if stood.state in _APPLIED:
            return True, f"applied in that run: {said}"
        return False, f"not applied in that run: {said}"
    if context.switched_off:
        line = context.switched_off
        return False, f"not applied in that run: torchcompat was switched off (line {line})"
    if context.stood:
        return False, "not applied in that run: torchcompat's report in the log does not have it"
    if context.ours_in_frames:
        line = context.ours_in_frames
        return None, f"torchcompat was at work (line {line}), but the log has no report of patches"
    return None, "the log does not say whether torchcompat was applied"


# -- for people


def _lines(name: str, found: Findings, build: TorchBuild | None, judged: list[Judged]) -> list[str]:
    shown = "standard input" if name == "-" else name
    lines = [f"{shown}: {found.lines} lines; {_which_torch(found.context, build)}"]
    lines += [found.cut] if found.cut else []
    for one in judged:
        lines += ["", *_paragraph(one)]
    if found.unknown:
        count = sum(t.count for t in found.unknown) + found.more_unknown
        failures = "1 failure" if count == 1 else f"{count} failures"
        lines += ["", f"unknown: {failures} that no sign knows"]
        lines += [f"  {_where(t)}: {t.message[:_MESSAGE_WIDTH]}" for t in found.unknown]
        lines += [f"  and {found.more_unknown} of other kinds"] if found.more_unknown else []
    if not judged and not found.unknown:
        lines.append("no failure that is known, and no traceback")
    return lines


def _paragraph(one: Judged) -> list[str]:
    doubt = "" if one.tally.sure else " (may be: the text has other causes too)"
    facts = "; ".join(filter(None, (one.coverage, one.application)))
    return [
        f"{one.known.id}: {one.known.title}{doubt}",
        f"  {_where(one.tally)}: {one.tally.message[:_MESSAGE_WIDTH]}",
        f"  {facts}",
        f"  next: {one.next}",
    ]


def _where(tally: Tally) -> str:
    times = "once" if tally.count == 1 else f"{tally.count} times"
    origin = place(tally.who, tally.thread)
    first = f"line {tally.number}" + (f" ({origin})" if origin else "")
    others = [name for name, _ in tally.streams.most_common() if name != origin]
    also = ", ".join(others[:_STREAMS_SHOWN])
    more = f" and {len(others) - _STREAMS_SHOWN} more" if len(others) > _STREAMS_SHOWN else ""
    tail = f", also in {also}{more}" if also else ""
    return f"{times}, {'' if tally.count == 1 else 'first '}at {first}{tail}"


def _which_torch(context: Context, build: TorchBuild | None) -> str:
    if context.version is None:
        here = f"judged for the installed {build.version}" if build else "and none is installed"
        return f"the log does not say which torch, {here}"
    line = context.version_lines[context.version]
    others = sorted(set(context.versions) - {context.version})
    also = f" (it also names {', '.join(others)})" if others else ""
    return f"torch {context.version}, named in line {line}{also}"


# -- for programs


def _to_dict(
    name: str, found: Findings, build: TorchBuild | None, judged: list[Judged]
) -> dict[str, Any]:
    context = found.context
    return {
        "log": name,
        "lines": found.lines,
        "cut": found.cut,
        "torch": {
            "version": None if build is None else build.version,
            "from": "log" if context.version else "installed",
            "line": context.version_lines.get(context.version or ""),
            "named": dict(context.versions),
        },
        "report": {i: s.state.value for i, s in context.stood.items()},
        "hazards": [one.to_dict() for one in judged],
        "unknown": [_tally(tally) for tally in found.unknown],
        "more_unknown": found.more_unknown,
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "count": tally.count,
        "line": tally.number,
        "stream": tally.who,
        "thread": tally.thread,
        "streams": dict(tally.streams),
        "message": tally.message,
    }
