"""One thread exports (and compiles); an eager thread asks whether it is being compiled."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch

harness.warm_up()
harness.apply_patches("is_compiling_flag")
x = torch.randn(4)
faults = []
answers: list[bool] = []


class Slow(torch.nn.Module):
    """Stands still while it is traced, in the thread that traces it."""

    def __init__(self, inside: threading.Event, leave: threading.Event) -> None:
        super().__init__()
        self.inside, self.leave = inside, leave

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        answers.append(torch.compiler.is_compiling())
        self.inside.set()
        self.leave.wait(harness.WAIT_S)
        return y.sin()


# 1. An export in one thread, an eager thread beside it.
inside, leave = threading.Event(), threading.Event()
export = harness.Worker(lambda: torch.export.export(Slow(inside, leave), (x,), strict=False))
inside.wait(harness.WAIT_S)
if harness.Worker(torch.compiler.is_compiling).finish().result:
    faults.append("is_compiling() is True in an eager thread while another one exports")
leave.set()
export.finish()
if export.error is not None:
    faults.append(f"the export raised {harness.first_line(export.error)[:80]}")
elif not answers[0]:
    faults.append("is_compiling() is False in the thread that exports")

# 2. A compile in one thread, an eager thread beside it.
inside, leave = threading.Event(), threading.Event()


def backend(graph: Any, _inputs: Any) -> Any:
    inside.set()
    leave.wait(harness.WAIT_S)
    return graph.forward


compiling = harness.Worker(lambda: torch.compile(lambda y: y + 1, backend=backend)(x))
inside.wait(harness.WAIT_S)
if harness.Worker(torch.compiler.is_compiling).finish().result:
    faults.append("is_compiling() is True in an eager thread while another one compiles")
leave.set()
compiling.finish()
if torch.compiler.is_compiling():
    faults.append("is_compiling() stays True")
harness.verdict(faults)
