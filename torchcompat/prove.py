"""Run the programs that patches bring, each in a process of its own, without and with the patch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import torchcompat
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError
from torchcompat.plugins import Registered
from torchcompat.report import Report
from torchcompat.verdict import State

TIMEOUT_S: Final = 300

#: What a proof can come to; the last two are findings.
FIXED_BY_US: Final = "fixed by us"
FIXED_UPSTREAM: Final = "fixed upstream"
NOT_HERE: Final = "not reproducible here"
PRESENT: Final = "bug present"
BROKEN: Final = "broken by us"


@dataclass(frozen=True)
class Run:
    """One run of a program; `status`: 0 it behaves right, 1 the fault shows, 2 no say here."""

    status: int
    text: str
    seconds: float


@dataclass(frozen=True)
class Proof:
    """What the two runs of a patch's program say about this torch."""

    patch: str
    outcome: str
    unpatched: Run
    patched: Run | None

    @property
    def is_finding(self) -> bool:
        return self.outcome in (PRESENT, BROKEN)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fresh_plan() -> Report:
    """The plan with everything imported that patches wait for: nothing is left pending that an
    import can settle."""
    report = torchcompat.plan()
    for verdict in report:
        if verdict.state is State.PENDING:
            for name in ENGINE.registered(verdict.patch_id).patch.modules:
                if importlib.util.find_spec(name.partition(".")[0]) is None:
                    break  # a package that is not here (triton on a CPU) is no finding
                try:
                    importlib.import_module(name)
                except Exception as e:  # noqa: BLE001 - a torch that does not import is a finding
                    print(f"torchcompat: import of {name} failed: {e}", file=sys.stderr)
    return torchcompat.plan()


def prove(registered: Registered, *, unpatched_only: bool = False) -> Proof:
    """Both runs of one patch's program. Raises `ConfigError` if it brings none."""
    patch = registered.patch
    if patch.repro is None:
        raise ConfigError(f"patch {patch.id!r} brings no reproducer")
    program = resources.files(registered.package).joinpath(patch.repro)
    with resources.as_file(program) as path:
        without = _run(path, patched=False)
        skip = unpatched_only or without.status == 2
        patched = None if skip else _run(path, patched=True)
    return Proof(patch.id, _outcome(patch.id, without, patched), without, patched)


def prove_all(
    registered: Sequence[Registered], *, at_once: int, tell: Callable[[Proof], None]
) -> list[Proof]:
    """Proofs in the order given, `at_once` of them side by side; `tell` hears of each as it ends,
    in that order too."""
    fresh_plan()  # what the outcome of a fixed fault asks for is settled before threads ask
    proofs = []
    with ThreadPoolExecutor(at_once) as pool:
        for proof in pool.map(prove, registered):
            tell(proof)
            proofs.append(proof)
    return proofs


def _outcome(patch_id: str, without: Run, patched: Run | None) -> str:
    if without.status == 0 and patched is not None and patched.status != 0:
        return BROKEN
    if without.status == 0:
        fixed = fresh_plan()[patch_id].state is State.FIXED
        return FIXED_UPSTREAM if fixed else NOT_HERE
    if without.status == 2:
        return NOT_HERE
    return FIXED_BY_US if patched is not None and patched.status == 0 else PRESENT


def child_environ() -> dict[str, str]:
    """For a process that finds the same torchcompat, and none of the user's settings."""
    # Nor TORCHCOMPAT_AUTO, which would patch the run without the patch.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPAT")}
    root = Path(torchcompat.__file__).parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, perhaps known by the current directory
        inherited = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join([str(root), *inherited])
    return environ


def _run(path: Path, *, patched: bool) -> Run:
    """Run a program in a process of its own; a crash or hang counts as the fault."""
    environ = child_environ() | {"TORCHCOMPAT_REPRO_APPLY": "1" if patched else "0"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Run(1, f"no end after {TIMEOUT_S} s", float(TIMEOUT_S))
    seconds = round(time.monotonic() - started, 1)
    lines = done.stdout.strip().splitlines()
    status = done.returncode if done.returncode in (0, 1, 2) else 1
    if status != done.returncode or not lines:
        errors = done.stderr.strip().splitlines()
        text = f"ended with status {done.returncode}; {errors[-1] if errors else 'no output'}"
        return Run(status, text, seconds)
    return Run(status, lines[-1], seconds)
