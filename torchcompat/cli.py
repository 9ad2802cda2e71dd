"""torchcompat status | plan | explain ID | repro ID [--unpatched]

Exit status 0: clean. 1: a finding. 2: the command or a setting means nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import torchcompat
from torchcompat.config import ENVIRONMENT
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError
from torchcompat.report import Report
from torchcompat.verdict import FINDINGS, State

REPRO_TIMEOUT_S: Final = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ConfigError as e:
        print(f"torchcompat: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchcompat", description="Patches that make torch safe for threads, and their state."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    for name, text in (
        ("status", "what apply() would do in a fresh process; applies nothing"),
        ("plan", "the verdicts alone"),
    ):
        command = commands.add_parser(name, help=text, parents=[common])
        command.set_defaults(run=_status if name == "status" else _plan)
    command = commands.add_parser("explain", help="all about one patch", parents=[common])
    command.add_argument("id")
    command.set_defaults(run=_explain)
    command = commands.add_parser(
        "repro", help="run a patch's proof without and with the patch", parents=[common]
    )
    command.add_argument("id")
    command.add_argument("--unpatched", action="store_true", help="without the patch only")
    command.set_defaults(run=_repro)
    return parser


def _fresh_plan() -> Report:
    """The plan with everything imported that patches wait for: nothing is left pending that an
    import can settle."""
    report = torchcompat.plan()
    for verdict in report:
        if verdict.state is State.PENDING:
            for name in ENGINE.registered(verdict.patch_id).patch.modules:
                try:
                    importlib.import_module(name)
                except Exception as e:  # noqa: BLE001 - a torch that does not import is a finding
                    print(f"torchcompat: import of {name} failed: {e}", file=sys.stderr)
    return torchcompat.plan()


def _status(args: argparse.Namespace) -> int:
    report = _fresh_plan()
    print(report.to_json() if args.json else report)
    return 0 if report else 1


def _plan(args: argparse.Namespace) -> int:
    report = _fresh_plan()
    print(report.to_json() if args.json else report.table())
    return 0 if report else 1


def _explain(args: argparse.Namespace) -> int:
    ENGINE.registered(args.id)  # an unknown id is told before torch is imported
    verdict = _fresh_plan()[args.id]
    print(json.dumps(verdict.to_dict(), indent=2) if args.json else torchcompat.explain(args.id))
    return 1 if verdict.state in FINDINGS else 0


def _repro(args: argparse.Namespace) -> int:
    registered = ENGINE.registered(args.id)
    if registered.patch.repro is None:
        raise ConfigError(f"patch {args.id!r} brings no reproducer")
    program = resources.files(registered.package).joinpath(registered.patch.repro)
    with resources.as_file(program) as path:
        without = _run(path, patched=False)
        patched = None if args.unpatched or without["status"] == 2 else _run(path, patched=True)
    outcome, code = _outcome(args.id, without["status"], patched["status"] if patched else None)
    if args.json:
        runs = {"unpatched": without, "patched": patched}
        print(json.dumps({"patch": args.id, "outcome": outcome, **runs}, indent=2))
        return code
    print(f"without the patch: {without['text']}")
    if patched is not None:
        print(f"with the patch:    {patched['text']}")
    print(f"{args.id}: {outcome}")
    return code


def _outcome(patch_id: str, without: int, patched: int | None) -> tuple[str, int]:
    """In words, and the exit status."""
    if without == 0 and patched not in (None, 0):
        return "broken by us", 1
    if without == 0:
        fixed = _fresh_plan()[patch_id].state is State.FIXED
        return ("fixed upstream" if fixed else "not reproducible here"), 0
    if without == 2:
        return "not reproducible here", 0
    return ("fixed by us", 0) if patched == 0 else ("bug present", 1)


def _run(path: Path, *, patched: bool) -> dict[str, Any]:
    """Run a reproducer in a process of its own; a crash or hang counts as the fault."""
    environ = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    environ["TORCHCOMPAT_REPRO_APPLY"] = "1" if patched else "0"
    root = Path(torchcompat.__file__).parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, perhaps known by the current directory
        inherited = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join([str(root), *inherited])
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=REPRO_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": 1, "text": f"no end after {REPRO_TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    status = done.returncode if done.returncode in (0, 1, 2) else 1
    if status != done.returncode or not lines:
        errors = done.stderr.strip().splitlines()
        text = f"ended with status {done.returncode}; {errors[-1] if errors else 'no output'}"
        return {"status": status, "text": text}
    return {"status": status, "text": lines[-1]}
