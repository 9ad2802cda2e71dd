"""Two threads inside the run of one autotuned kernel; the launch itself is not needed to see it."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import harness

try:
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
except ModuleNotFoundError:
    harness.not_applicable("triton is not installed")
harness.apply_patches("triton_autotuner")
kernel = autotuner.Autotuner.__new__(autotuner.Autotuner)
faults: list[str] = []
inside, other_done = threading.Event(), threading.Event()


def call() -> None:
    """What `run` does around its choice of a configuration."""
    kernel.nargs = {"n": 1}
    inside.set()
    other_done.wait(harness.WAIT_S)
    assert {**kernel.nargs, "extra": 2} == {"n": 1, "extra": 2}
    kernel.nargs = None


def other() -> None:
    inside.wait(harness.WAIT_S)
    kernel.nargs = {"n": 2}
    kernel.nargs = None
    other_done.set()


workers = [harness.Worker(call), harness.Worker(other)]
for worker in workers:
    if worker.finish().error is not None:
        faults.append(f"a call raised {harness.first_line(worker.error)}")
harness.verdict(faults)
