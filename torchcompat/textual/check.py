"""`python -m torchcompat check`: the verdicts on a torch that is not installed.

The looking is done in a process of its own (`worker`), in which the real torch cannot be imported.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from torchcompat import config
from torchcompat.build import TorchBuild
from torchcompat.report import Report
from torchcompat.textual.looking import Change, changes, look_into
from torchcompat.verdict import State, Verdict


def report_of(found: dict[str, Any]) -> Report:
    """The worker's verdicts as what `plan()` returns."""
    verdicts = tuple(
        Verdict(v["patch"], State(v["state"]), v["reason"], tuple(v["evidence"]), v["provenance"])
        for v in found["verdicts"]
    )
    build = TorchBuild.of(found["torch"]["version"], found["torch"]["git"])
    return Report(verdicts, build, config.load())


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
