"""torch's own tests without and with the patches: what fails only with them.

    python .ci/torch_tests.py PYTORCH/test dynamo/test_misc.py "test_autograd.py -k checkpoint"

PYTORCH is a source tree of torch, best of the release that is installed for the interpreter that
runs this; nothing is fetched. After the file may stand arguments for pytest. Each entry runs twice,
in processes of its own. A test that fails only with the patches is run again by itself on both
sides, since not all of torch's tests are steady. One that a time limit or a crash kept from running
counts as neither; the table's last column says how many ran on one side only.

Needs pytest, pytest-timeout and what torch's tests import (expecttest, hypothesis, numpy).

Exit status 0: no test fails that passes on stock torch. 1: some do, or an entry ran no test. 2: a
wrong command line.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SIDES = ("stock", "patched")
#: For the processes with the tests: where outcomes go, and whether to apply the patches.
OUTCOMES, SIDE = "TORCH_TESTS_OUTCOMES", "TORCH_TESTS_SIDE"
#: Neither our own plugin nor torch's conftest.py (for its CI, and an older pytest), no files in the
#: source tree, and a test that hangs is one failure.
PYTEST = (
    *(
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:torchcompat",
        "-p",
        Path(__file__).stem,
    ),
    *("--tb=short", "-W", "ignore", "--timeout-method=signal"),
)

Outcomes = dict[str, str]


# -- as a plugin of pytest, in the processes with the tests

if os.environ.get(SIDE) == "patched":
    import torchcompat

    if not len(torchcompat.apply()):
        raise SystemExit("the patches do not load, so both sides would be stock torch")


def pytest_runtest_logreport(report: Any) -> None:
    """Note what became of a test, at once: the process may not live to its end."""
    if report.when == "call" or report.outcome != "passed":
        with Path(os.environ[OUTCOMES]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


# -- as the program


def run(
    tests: Path, words: list[str], side: str, limits: argparse.Namespace, log: Path
) -> Outcomes:
    """By test "passed", "failed" or "skipped"; pytest's output is added to `log`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPAT")}
    paths = (str(ROOT), str(Path(__file__).parent), environ.get("PYTHONPATH", ""))
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory() as folder, log.open("a") as output:
        outcomes = Path(folder) / "outcomes"
        environ |= {OUTCOMES: str(outcomes), SIDE: side}
        command = [sys.executable, "-m", "pytest", *PYTEST, f"--timeout={limits.test_s}", *words]
        try:
            subprocess.run(
                command,
                cwd=tests,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limits.entry_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            output.write(f"\nended after {limits.entry_s} s\n")
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    found: Outcomes = {}
    for test, outcome in map(json.loads, lines):
        if found.get(test) != "failed":  # an error of the teardown comes after "passed"
            found[test] = outcome
    return found


def compare(stock: Outcomes, patched: Outcomes) -> list[str]:
    """The tests that pass on stock torch and fail with the patches."""
    return [t for t, outcome in patched.items() if outcome == "failed" and stock.get(t) == "passed"]


def row(entry: str, both: dict[str, Outcomes]) -> str:
    """One line of the table."""
    cells = [entry]
    for outcomes in both.values():
        counts = collections.Counter(outcomes.values())
        cells += [str(counts[name]) for name in ("passed", "failed", "skipped")]
    stock, patched = both.values()
    cells += [str(len(stock.keys() ^ patched.keys()))]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Run all entries; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder test/ of a source tree of torch")
    parser.add_argument("entries", nargs="+", help="a file in it, and arguments for pytest")
    parser.add_argument(
        "--entry-s", type=float, default=600, help="limit of an entry (default 600)"
    )
    parser.add_argument("--test-s", type=float, default=120, help="limit of a test (default 120)")
    parser.add_argument("--logs", type=Path, default=Path("torch_tests_logs"), help="a new folder")
    options = parser.parse_args()
    if not options.tests.is_dir():
        parser.error(f"{options.tests} is not a folder; name the folder test/ of torch's source")
    options.logs.mkdir(parents=True, exist_ok=True)
    print("| tests | passed | failed | skipped | passed with | failed with | skipped with | one |")
    print("|---|---|---|---|---|---|---|---|")
    new: list[str] = []
    empty: list[str] = []
    for entry in options.entries:
        words = shlex.split(entry)
        logs = {side: options.logs / f"{Path(words[0]).stem}-{side}.log" for side in SIDES}
        both = {side: run(options.tests, words, side, options, logs[side]) for side in SIDES}
        print(row(entry, both), flush=True)
        if not all(both.values()):
            empty.append(f"{entry}: no test ran; see {options.logs}")
        for test in compare(*both.values()):
            again = {side: run(options.tests, [test], side, options, logs[side]) for side in SIDES}
            if compare(*again.values()):
                new.append(test)
    print("\n".join(["", f"{len(new)} fail only with the patches, alone as well", *new, *empty]))
    return 1 if new or empty else 0


if __name__ == "__main__":
    sys.exit(main())
