"""Two threads first use the compiler: one is inside Inductor when the other is inside Dynamo."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any

import harness
import torch

harness.apply_patches("first_import")
PACKAGES = ("torch._inductor", "torch._dynamo")
inside: set[str] = set()
local = threading.local()
started = threading.Barrier(2)


def pause(event: str, args: tuple[Any, ...]) -> None:
    """Let each thread wait, inside the package that it imports first, until the other is inside
    its own, or waits for an import."""
    mine = getattr(local, "package", None)
    if event != "import" or not mine or not args[0].startswith(mine + "."):
        return
    local.package = None
    inside.add(mine)
    until = time.monotonic() + harness.WAIT_S / 2
    while len(inside) < len(PACKAGES) and time.monotonic() < until and not others_wait():
        time.sleep(0.01)


def others_wait() -> bool:
    """Whether a thread waits for a module's lock; a list of locks from Python 3.12 on."""
    blocking: Any = importlib._bootstrap._blocking_on  # type: ignore[attr-defined]
    return any(locks for locks in list(blocking.values()))


def first_use(package: str, module: str) -> None:
    local.package = package
    started.wait(harness.WAIT_S)
    importlib.import_module(package)
    importlib.import_module(module)


if "torch._dynamo" in sys.modules:
    harness.not_applicable("torch imports its compiler with itself")
sys.addaudithook(pause)
faults: list[str] = []
for worker in [
    harness.Worker(lambda: first_use("torch._inductor", "torch._inductor.compile_fx")),
    harness.Worker(lambda: first_use("torch._dynamo", "torch._dynamo.convert_frame")),
]:
    if worker.finish().error is not None:
        faults.append(harness.first_line(worker.error)[:100])
try:
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
except Exception as e:
    faults.append(f"later: {harness.first_line(e)[:100]}")
harness.verdict(faults)
