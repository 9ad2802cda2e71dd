"""The newest nightly of torch against the newest release: install, judge, test, prove, report.

    python .ci/nightly.py install
    python .ci/nightly.py report [--json] [--output FILE] [--at-once N] [-- PYTEST ARGUMENT …]

Run by `tox -e torch-nightly`, in the environment of the interpreter that runs it. `install` takes
torch from TORCH_WHEELS (a folder) or TORCH_NIGHTLY_INDEX, and says in one sentence which of them to
set where there is none to be had. `report` compares with docs/hazards.json, which holds what
`torchcompat prove` found on each release.

Exit status 0: nothing to look at. 1: findings. 2: no torch, or a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INDEX = "https://download.pytorch.org/whl/nightly/cpu"
RELEASES = ROOT / "docs" / "hazards.json"
INSTALL_S = 1800
#: The outcomes of `torchcompat prove` that somebody should look at.
BAD = ("bug present", "broken by us")


def main() -> int:
    """Run one command; the exit status."""
    arguments, _, pytest_arguments = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    commands.add_parser("install", help="torch's newest nightly, then this checkout")
    report = commands.add_parser("report", help="what changed against the newest release")
    report.add_argument("--json", action="store_true", help="print JSON")
    report.add_argument("--output", type=Path, help="write the JSON here as well")
    report.add_argument("--at-once", type=int, default=1, help="proofs that run side by side")
    options = parser.parse_args(arguments)
    if options.command == "install":
        return install()
    return tell(options, pytest_arguments)


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--", argv[at + 1 :]


# -- install


def source() -> tuple[list[str], str]:
    """pip's options for where torch is to come from, and how to say it."""
    wheels, index = os.environ.get("TORCH_WHEELS"), os.environ.get("TORCH_NIGHTLY_INDEX")
    if wheels:
        return ["--no-index", "--find-links", wheels], f"TORCH_WHEELS={wheels}"
    return ["--index-url", index or INDEX], index or INDEX


def install() -> int:
    """torch alone from its source, so that no other index can offer a release instead; then what
    torch and this checkout need, from pip's own indexes."""
    options, place = source()
    environ = without_other_places()
    with tempfile.TemporaryDirectory() as folder:
        quick = ["--retries", "1", "--timeout", "20", "--quiet", "--dest", folder]
        found = pip(["download", "--pre", "--no-deps", *quick, *options, "torch"], environ)
        wheels = sorted(map(str, Path(folder).glob("torch-*")))
        if found.returncode or not wheels:
            print(
                f"no nightly of torch to be had from {place}: set TORCH_NIGHTLY_INDEX to an index "
                "that answers, or TORCH_WHEELS to a folder with a nightly's wheel.",
                file=sys.stderr,
            )
            return 2
        done = pip(["install", "--quiet", *wheels, f"{ROOT}[dflash,test]"], dict(os.environ))
    if done.returncode:
        print(done.stderr.strip()[-2000:], file=sys.stderr)
    return 2 if done.returncode else 0


def without_other_places() -> dict[str, str]:
    """For a pip that looks nowhere but where it is told to, and still gets through to it: a folder
    or an index of the user's settings may have releases that sort after every nightly."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_EXTRA", "PIP_FIND"))}
    for line in pip(["config", "list"], dict(os.environ)).stdout.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2].replace("-", "_").upper()
        if key in ("CERT", "CLIENT_CERT", "PROXY", "TRUSTED_HOST"):
            environ.setdefault(f"PIP_{key}", value.strip("'\""))
    return environ | {"PIP_CONFIG_FILE": os.devnull}


def pip(arguments: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )


# -- report


@dataclass(frozen=True)
class Change:
    """One patch whose proof comes to something else than on the release; None: not proved."""

    patch: str
    before: str | None
    now: str | None
    text: str


def changes(before: dict[str, str], proofs: list[dict[str, Any]]) -> list[Change]:
    """By patch, in the order of the proofs; patches that are gone come last."""
    now = {p["patch"]: p for p in proofs}
    found = []
    for patch in [*now, *(set(before) - set(now))]:
        proof = now.get(patch)
        outcome = proof["outcome"] if proof else None
        if outcome != before.get(patch):
            text = _said(proof) if proof else ""
            found.append(Change(patch, before.get(patch), outcome, text))
    return found


def _said(proof: dict[str, Any]) -> str:
    """What the program printed, of the run that decides."""
    run = proof["patched"] if proof["outcome"] == "broken by us" else proof["unpatched"]
    return str(run["text"])


def newest_release(results: dict[str, dict[str, str]], python: str) -> tuple[str, dict[str, str]]:
    """The column of the newest torch, of this Python if there is one. Raises `LookupError`."""

    def order(key: str) -> tuple[list[int], bool]:
        torch, _, other = key.partition(", Python ")
        numbers = [int(n) for n in re.findall(r"\d+", torch.partition("+")[0])]
        return numbers, other == python

    if not results:
        raise LookupError("no release has been proved: run `python docs/make_hazards.py`")
    key = max(results, key=order)
    return key, results[key]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """A command with this interpreter, in the checkout."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def as_json(arguments: list[str]) -> dict[str, Any]:
    """What a torchcompat command says. Raises `LookupError` where it says nothing."""
    done = run(["-m", "torchcompat", *arguments, "--json"])
    try:
        content: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LookupError(f"torchcompat {arguments[0]} gave no result: {last}") from None
    return content


def gather(pytest_arguments: list[str], at_once: int) -> dict[str, Any]:
    """Everything the report is about. Raises `LookupError`."""
    plan = as_json(["plan"])
    if plan["torch"] is None:
        raise LookupError("torch is not installed here: run `python .ci/nightly.py install` first")
    python = ".".join(plan["python"].split(".")[:2])
    release, before = newest_release(json.loads(RELEASES.read_text()), python)
    tests = run(["-m", "pytest", *pytest_arguments])
    proofs = as_json(["prove", "--at-once", str(at_once)])["proofs"]
    return {
        "torch": plan["torch"],
        "python": plan["python"],
        "release": release,
        "findings": [p for p in plan["patches"] if p["state"] in FINDING_STATES],
        "tests": {
            "status": tests.returncode,
            "summary": (tests.stdout.strip().splitlines() or ["no output"])[-1],
            "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", tests.stdout, re.MULTILINE),
        },
        "proofs": proofs,
        "changes": [asdict(change) for change in changes(before, proofs)],
    }


FINDING_STATES = ("drifted", "conflict", "missing", "blocked", "failed", "displaced")


def is_finding(report: dict[str, Any]) -> bool:
    return bool(
        report["findings"]
        or report["tests"]["status"]
        or any(proof["outcome"] in BAD for proof in report["proofs"])
    )


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people: what changed first, then what is wrong."""
    torch = report["torch"]
    git = f", git {torch['git'][:10]}" if torch["git"] else ""
    text = [
        f"torch {torch['version']} ({torch['channel']}{git}), Python {report['python']}, "
        f"against {report['release']}",
    ]
    if torch["channel"] != "nightly":
        text.append("  this is no nightly: look at where it was installed from")
    text.append(f"proofs: {len(report['proofs'])}, changed: {len(report['changes'])}")
    for change in report["changes"]:
        before, now = change["before"] or "not proved", change["now"] or "no such patch"
        text.append(f"  {change['patch']}: {before} -> {now}  {change['text']}".rstrip())
    text.append(f"verdicts to look at: {len(report['findings'])}")
    text += [f"  {v['patch']} is {v['state']}: {v['reason']}" for v in report["findings"]]
    text.append(f"tests: {report['tests']['summary']}")
    text += [f"  {name}" for name in report["tests"]["failed"]]
    return text


def tell(options: argparse.Namespace, pytest_arguments: list[str]) -> int:
    """Gather, print, write; the exit status."""
    try:
        report = gather(pytest_arguments, options.at_once)
    except LookupError as e:
        print(e, file=sys.stderr)
        return 2
    content = json.dumps(report, indent=1)
    if options.output is not None:
        options.output.write_text(content + "\n")
    print(content if options.json else "\n".join(lines(report)))
    return int(is_finding(report))


if __name__ == "__main__":
    raise SystemExit(main())
