"""One thread exports; another asks for a compiled model, and two exports overlap."""

from __future__ import annotations

import sys
import threading
import warnings

import harness
import torch
from torch import nn
from torch._export.utils import _compiling_state_context

harness.warm_up()
if not hasattr(torch.compiler, "_is_exporting_flag"):
    print(f"torch {torch.__version__}: has no such flag")
    sys.exit(2)
harness.apply_patches("export_threads")
warnings.filterwarnings("ignore")
faults = []
x = torch.randn(4)
answers: list[bool] = []


class Gate(nn.Module):
    """Stands still while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        answers.append(torch.compiler.is_exporting())
        self.inside.set()
        self.leave.wait(harness.WAIT_S)
        return y + 1


# 1. Another thread is no export, and its torch.compile compiles.
gate = Gate()
export = harness.Worker(lambda: torch.export.export(gate, (x,), strict=False))
gate.inside.wait(harness.WAIT_S)
if torch.compiler.is_exporting():
    faults.append("is_exporting() in a thread that does not export")
compiles: list[str] = []


def counting(gm: torch.fx.GraphModule, _: object) -> object:
    compiles.append("")
    return gm.forward


compiled = torch.compile(nn.Linear(4, 4), backend=counting)
gate.leave.set()
export.finish()
compiled(x)
if not compiles:
    faults.append("a model compiled meanwhile stays eager for good")
if answers != [True]:
    faults.append("is_exporting() is False inside the export")

# 2. The first of two exports to begin ends first. (Only what sets the flag: two whole exports that
# overlap meet other faults of torch.)
states = [_compiling_state_context(), _compiling_state_context()]
begun, go = threading.Event(), threading.Event()


def second_export() -> None:
    with states[1]:
        begun.set()
        go.wait(harness.WAIT_S)


with states[0]:
    second = harness.Worker(second_export)
    begun.wait(harness.WAIT_S)
go.set()
second.finish()
if torch.compiler.is_exporting():
    faults.append("is_exporting() stays True after two overlapping exports")
harness.verdict(faults)
