"""`python -m torchcompat check`: the verdicts on a torch that is not installed.

The looking is done in a process of its own (`worker`), in which the real torch cannot be imported.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torchcompat
from torchcompat import config
from torchcompat.build import TorchBuild
from torchcompat.errors import ConfigError
from torchcompat.report import Report
from torchcompat.verdict import State, Verdict

TIMEOUT_S: Final = 300
#: Lines of a difference that are shown of one place.
MAX_LINES: Final = 40

Moved = Literal["same", "text changed", "signature changed", "gone", "new"]


def look_into(target: str, *, verdicts: bool = True, fingerprints: bool = False) -> dict[str, Any]:
    """What the worker finds at `target`. Raises `ConfigError` where it cannot be looked into."""
    job = {"target": target, "verdicts": verdicts, "fingerprints": fingerprints}
    environ = dict(os.environ)
    root = Path(torchcompat.__file__).parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, perhaps known by the current directory
        inherited = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join([str(root), *inherited])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torchcompat.textual.worker"],
            input=json.dumps(job),
            env=environ,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{target}: no end of reading after {TIMEOUT_S} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"{target}: the process that reads it ended with status {done.returncode}: {last}"
        ) from None
    if "error" in found:
        raise ConfigError(str(found["error"]))
    return found


def report_of(found: dict[str, Any]) -> Report:
    """The worker's verdicts as what `plan()` returns."""
    verdicts = tuple(
        Verdict(v["patch"], State(v["state"]), v["reason"], tuple(v["evidence"]), v["provenance"])
        for v in found["verdicts"]
    )
    build = TorchBuild.of(found["torch"]["version"], found["torch"]["git"])
    return Report(verdicts, build, config.load())


@dataclass(frozen=True)
class Change:
    """How one place of torch differs between two builds, and the patches that look at it."""

    place: str
    moved: Moved
    patches: tuple[str, ...]
    difference: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "moved": self.moved,
            "patches": list(self.patches),
            "difference": list(self.difference),
        }

    def __str__(self) -> str:
        shown = list(self.difference[:MAX_LINES])
        if len(self.difference) > MAX_LINES:
            shown.append(f"… {len(self.difference) - MAX_LINES} more lines; --json has all")
        head = f"{self.place}: {self.moved} ({', '.join(self.patches)})"
        return "\n".join([head, *(f"    {line}" for line in shown)])


Prints = dict[str, dict[str, dict[str, Any]]]


def changes(before: Prints, after: Prints) -> list[Change]:
    """All places of all patches; `Prints` is patch id -> place -> digest, signature, text."""
    old, new = _by_place(before), _by_place(after)
    found = []
    for place in dict.fromkeys([*old, *new]):
        (patches, was), (later, now) = old.get(place, ((), None)), new.get(place, ((), None))
        users = tuple(dict.fromkeys([*patches, *later]))
        moved = _moved(was, now)
        lines: tuple[str, ...] = ()
        if was and now and moved != "same":
            lines = tuple(difflib.unified_diff(was["text"], now["text"], lineterm="", n=2))[2:]
        found.append(Change(place, moved, users, lines))
    return found


def _by_place(prints: Prints) -> dict[str, tuple[tuple[str, ...], dict[str, Any] | None]]:
    found: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {}
    for patch_id, places in prints.items():
        for place, fingerprint in places.items():
            users, _ = found.get(place, ((), None))
            found[place] = ((*users, patch_id), fingerprint)
    return found


def _moved(was: dict[str, Any] | None, now: dict[str, Any] | None) -> Moved:
    if was is None or now is None:
        return "new" if was is None else "gone"
    if was["signature"] != now["signature"]:
        return "signature changed"
    return "same" if was["digest"] == now["digest"] else "text changed"


def command(args: argparse.Namespace) -> int:
    """Exit status 0: nothing to look at in TARGET; 1: a finding there."""
    fingerprints = args.against is not None
    found = look_into(args.target, fingerprints=fingerprints)
    report = report_of(found)
    content = {"target": args.target, **report.to_dict()}
    lines = [f"{args.target}: {report.build}, read as text", "", report.table()]
    notes = [f"{v.patch_id}: {line}" for v in report for line in v.evidence if _is_note(line)]
    lines += ["", *notes] if notes else []
    if args.against is not None:
        other = look_into(args.against, fingerprints=True)
        moved = changes(other["fingerprints"], found["fingerprints"])
        differ = _verdicts_that_differ(report_of(other), report)
        content["against"] = {
            "target": args.against,
            "torch": other["torch"],
            "verdicts": differ,
            "places": [change.to_dict() for change in moved],
        }
        lines += ["", *_shown(args.against, report_of(other), differ, moved)]
    print(json.dumps(content, indent=2) if args.json else "\n".join(lines))
    return 0 if report else 1


def _is_note(evidence: str) -> bool:
    """What tells a verdict over text from one over a loaded torch."""
    return evidence.startswith(("by the version:", "not in the text")) or " is not part of " in (
        evidence
    )


def _verdicts_that_differ(before: Report, after: Report) -> list[dict[str, str]]:
    states = {v.patch_id: v.state.value for v in before}
    return [
        {"patch": v.patch_id, "before": states.get(v.patch_id, "unknown"), "now": v.state.value}
        for v in after
        if states.get(v.patch_id) != v.state.value
    ]


def _shown(
    target: str, before: Report, differ: list[dict[str, str]], moved: list[Change]
) -> list[str]:
    lines = [f"since {target}: {before.build}"]
    lines += [f"{d['patch']}: {d['before']} -> {d['now']}" for d in differ]
    lines += [] if differ else ["no verdict differs"]
    lines += [str(change) for change in moved if change.moved != "same"]
    same = sum(change.moved == "same" for change in moved)
    return [*lines, f"{len(moved)} places, {same} the same"]


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "check",
        help="the verdicts on a torch that is not installed, read as text",
        parents=[common],
    )
    parser.add_argument("target", metavar="TARGET", help="a wheel, a checkout or a folder")
    parser.add_argument(
        "--against", metavar="OTHER", help="another torch: what has moved from it to TARGET"
    )
    parser.set_defaults(run=command)
