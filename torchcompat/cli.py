"""torchcompat status | plan | explain ID|LOG | where | check | lock | doctor | repro | prove | run

Exit status 0: clean. 1: a finding. 2: the command or a setting means nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torchcompat
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError, PluginError
from torchcompat.prove import BROKEN, Proof, fresh_plan, prove, prove_all
from torchcompat.verdict import FINDINGS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, PluginError) as e:
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
    command = commands.add_parser(
        "explain", help="all about one patch, or what a log's failures are", parents=[common]
    )
    command.add_argument("what", nargs="?", metavar="ID|LOG", help="- is standard input")
    command.set_defaults(run=_explain)
    command = commands.add_parser(
        "repro", help="run a patch's proof without and with the patch", parents=[common]
    )
    command.add_argument("id")
    command.add_argument("--unpatched", action="store_true", help="without the patch only")
    command.set_defaults(run=_repro)
    command = commands.add_parser(
        "prove", help="run the proofs of all patches, or of those named", parents=[common]
    )
    command.add_argument("ids", nargs="*", metavar="ID")
    command.add_argument("--at-once", type=int, default=1, help="proofs that run side by side")
    command.set_defaults(run=_prove)
    _add_textual(commands, common)
    _add_run(commands)
    _add_doctor(commands, common)
    return parser


def _add_textual(commands: Any, common: argparse.ArgumentParser) -> None:
    from torchcompat.textual import check, lock, where

    for module in (check, where, lock):
        module.add_parser(commands, common)


def _add_doctor(commands: Commands, common: argparse.ArgumentParser) -> None:
    command = commands.add_parser(
        "doctor", help="what is here, what is wrong, what to do next", parents=[common]
    )
    command.add_argument("--no-import", action="store_true", help="without importing torch")
    command.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this too, to see whether it patches what we patch; may be repeated",
    )
    command.add_argument(
        "--timeout", type=float, default=180.0, metavar="SECONDS", help="for importing torch"
    )
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from torchcompat.doctor.page import doctor

    if args.no_import and args.modules:
        raise ConfigError("--no-import and --import exclude each other")
    return doctor(
        imports=not args.no_import,
        modules=args.modules,
        as_json=args.json,
        timeout_s=args.timeout,
    )


def _add_run(commands: Commands) -> None:
    command = commands.add_parser(
        "run",
        usage="torchcompat run [--] COMMAND [ARG…] | SCRIPT.py [ARG…] | -m MODULE [ARG…]",
        help="run a program, and all that it starts, with the patches",
    )
    command.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from torchcompat.run import run

    return run(args.command, args.module)


def _status(args: argparse.Namespace) -> int:
    report = fresh_plan()
    print(report.to_json() if args.json else report)
    return 0 if report else 1


def _plan(args: argparse.Namespace) -> int:
    report = fresh_plan()
    print(report.to_json() if args.json else report.table())
    return 0 if report else 1


def _explain(args: argparse.Namespace) -> int:
    from torchcompat.logs import explain as logs  # of use here alone

    what: str = args.what or ""
    known = logs.hazards()  # an unknown id is told before torch is imported
    if what not in known and logs.is_log(args.what):
        return logs.explain_log(what or "-", args.json)
    logs.check_argument(args.what, known)
    if known[what].patch is None:
        print(json.dumps(known[what].to_dict(), indent=2) if args.json else known[what])
        return 0
    verdict = fresh_plan()[what]
    print(json.dumps(verdict.to_dict(), indent=2) if args.json else torchcompat.explain(what))
    return 1 if verdict.state in FINDINGS else 0


def _repro(args: argparse.Namespace) -> int:
    proof = prove(ENGINE.registered(args.id), unpatched_only=args.unpatched)
    if args.json:
        print(json.dumps(proof.to_dict(), indent=2))
        return int(proof.is_finding)
    print(f"without the patch: {proof.unpatched.text}")
    if proof.patched is not None:
        print(f"with the patch:    {proof.patched.text}")
    print(f"{args.id}: {proof.outcome}")
    return int(proof.is_finding)


def _prove(args: argparse.Namespace) -> int:
    ids = args.ids or [v.patch_id for v in torchcompat.plan() if _has_repro(v.patch_id)]
    chosen = [ENGINE.registered(patch_id) for patch_id in ids]
    width = max(map(len, ids), default=0)

    def tell(proof: Proof) -> None:
        seconds = proof.unpatched.seconds + (proof.patched.seconds if proof.patched else 0.0)
        if not args.json:
            seen = proof.patched if proof.outcome == BROKEN and proof.patched else proof.unpatched
            line = f"{proof.patch:<{width}}  {proof.outcome:<21}  {seconds:5.1f} s  {seen.text}"
            print(line, flush=True)

    started = time.monotonic()
    proofs = prove_all(chosen, at_once=args.at_once, tell=tell)
    if args.json:
        report = torchcompat.plan()
        content = {
            "torch": None if report.build is None else report.build.to_dict(),
            "python": sys.version.split()[0],
            "proofs": [proof.to_dict() for proof in proofs],
        }
        print(json.dumps(content, indent=2))
    else:
        counts = Counter(proof.outcome for proof in proofs)
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        print(f"{summary}; {time.monotonic() - started:.0f} s")
    return int(any(proof.is_finding for proof in proofs))


def _has_repro(patch_id: str) -> bool:
    try:
        return ENGINE.registered(patch_id).patch.repro is not None
    except ConfigError:  # a plugin that does not load has a verdict and no patches
        return False
