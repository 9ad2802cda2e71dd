"""The stress program itself, and one short run of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: Two rounds, which are 12 s of one core's work.
SHORT = ("--threads=3", "--operations=6", "--rounds=2", "--minutes=2")


def stress(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program; `before` is Python that runs in its process first."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{before}\n"
    code += f"from runner import main; sys.exit(main({list(arguments)!r}))"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPAT")}
    environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), environ.get("PYTHONPATH")) if p)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=170
    )


def planted(body: str) -> str:
    """A kind of operation of the name `planted`, with `body` for what it does."""
    return (
        "import threading, torch, operations\n"
        "@operations.kind(1, lambda rng: {'number': rng.randrange(1000)})\n"
        f"def planted(actor, s):\n    {body}\n"
    )


@pytest.mark.slow
def test_threads_agree_with_eager() -> None:
    ended = stress("--seed=7", *SHORT)
    assert ended.returncode == 0, ended.stderr
    assert "36 operations" in ended.stdout


@pytest.mark.slow
def test_threads_agree_with_eager_for_minutes() -> None:
    ended = stress("--seed=8", "--minutes=1.5", "--operations=15")
    assert ended.returncode == 0, ended.stderr


def test_a_wrong_result_is_told_with_its_thread_its_operation_and_the_line_that_runs_it_again() -> (
    None
):
    wrong = planted("torch.testing.assert_close(torch.ones(1), torch.zeros(1))")
    ended = stress("--seed=7", "--only=planted,flags", *SHORT, before=wrong)
    assert ended.returncode == 1
    assert re.search(
        r"^stress-\d failed at operation \d+: \{\"op\": \"planted\"", ended.stderr, re.M
    )
    assert "AssertionError: Tensor-likes are not close!" in ended.stderr
    assert re.search(
        r"^again: .* --seed=7 .*--replay=\d .*--only=planted,flags", ended.stderr, re.M
    )


def test_a_hang_ends_with_the_stacks_of_all_threads() -> None:
    hanging = planted("threading.Event().wait()")
    ended = stress("--seed=7", "--only=planted,flags", "--hang=1", *SHORT, before=hanging)
    assert ended.returncode == 3
    assert re.search(r"^  stress-\d, for \d+ s: \{\"op\": \"planted\"", ended.stderr, re.M)
    assert "in planted" in ended.stderr


def test_a_plan_is_the_same_for_the_same_numbers() -> None:
    ask = "from operations import plan; print(plan(3, 1, 2, 40) == plan(3, 1, 2, 40),"
    ask += "plan(3, 1, 2, 40) == plan(3, 1, 1, 40), *plan(3, 1, 2, 40)[:2]); sys.exit()"
    first, second, operations = stress(before=ask).stdout.split(maxsplit=2)
    assert (first, second) == ("True", "False")
    assert operations.count('{"op": ') == 2


def test_an_unknown_operation_is_refused() -> None:
    ended = stress("--only=reset,cal")
    assert ended.returncode == 2
    assert "no operation 'cal'; there are call, " in ended.stderr
