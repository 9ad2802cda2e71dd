"""A module is being imported, and its body calls compiled code; another thread traces a function of
that module, and has the compile lock."""

from __future__ import annotations

import importlib
import pathlib
import shutil
import sys
import tempfile
import textwrap
import threading
from typing import Any

import harness
import torch

harness.warm_up()
harness.apply_patches("import_lock")
folder = tempfile.mkdtemp()
sys.path.insert(0, folder)
pathlib.Path(folder, "half_imported.py").write_text(
    textwrap.dedent("""
        import __main__ as repro

        FACTOR = 3.0

        def scaled(x):
            return x * FACTOR  # a global of this module: tracing imports it

        repro.body_reached(scaled)
        RESULT = repro.helper(repro.x)
    """)
)
x = torch.ones(3)
helper = torch.compile(lambda y: y + 1, backend="eager")
holds_lock, importing = threading.Event(), threading.Event()
traced: list[harness.Worker] = []


def wait_for_the_import() -> float:
    """Runs while tracing, with the compile lock held."""
    holds_lock.set()
    importing.wait(harness.WAIT_S)
    threading.Event().wait(0.3)  # until the body has come to the compile lock
    return 1.0


dynamo: Any = torch._dynamo
once_the_import_waits = dynamo.assume_constant_result(wait_for_the_import)


def body_reached(scaled: object) -> None:
    def outer(function: Any, y: torch.Tensor) -> Any:
        return function(y * once_the_import_waits()) + 1

    compiled = torch.compile(outer, backend="eager")
    traced.append(harness.Worker(lambda: compiled(scaled, x)))
    holds_lock.wait(harness.WAIT_S)
    importing.set()


bringing_in = harness.Worker(lambda: importlib.import_module("half_imported").RESULT)
bringing_in.join(10)
shutil.rmtree(folder, ignore_errors=True)
if bringing_in.is_alive():
    harness.verdict(["an import and a compile wait for each other for ever"])
faults = []
compiling = traced[0].finish()
for what, worker, want in (("import", bringing_in, x + 1), ("compile", compiling, x * 3 + 1)):
    if worker.error is not None:
        faults.append(f"{what} raised {harness.first_line(worker.error)[:90]}")
    elif not torch.equal(worker.result, want):
        faults.append(f"{what} gave a wrong result")
harness.verdict(faults)
