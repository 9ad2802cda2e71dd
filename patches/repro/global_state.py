"""One thread compiles; another one draws random numbers and assigns settings meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import harness
import torch

harness.warm_up()
harness.apply_patches("global_state")
x = torch.randn(4)
faults: list[str] = []


def during_a_compile(change: Callable[[], Any]) -> Any:
    """What `change` returns in this thread while another one compiles."""
    inside, leave = threading.Event(), threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        inside.set()
        leave.wait(harness.WAIT_S)
        return graph.forward

    compiling = harness.Worker(lambda: torch.compile(lambda y: y.sin(), backend=backend)(x))
    inside.wait(harness.WAIT_S)
    found = change()
    leave.set()
    if compiling.finish().error is not None:
        faults.append(f"the compile raised {harness.first_line(compiling.error)[:90]}")
    torch._dynamo.reset()
    return found


drawn = during_a_compile(lambda: torch.rand(3))
if torch.equal(drawn, torch.rand(3)):
    faults.append("random numbers are handed out twice")
during_a_compile(lambda: torch.use_deterministic_algorithms(True))
if not torch.are_deterministic_algorithms_enabled():
    faults.append("use_deterministic_algorithms(True) is undone")
torch.use_deterministic_algorithms(False)
during_a_compile(lambda: torch.set_default_dtype(torch.float64))
if torch.get_default_dtype() != torch.float64:
    faults.append("set_default_dtype is undone")
torch.set_default_dtype(torch.float32)
harness.verdict(faults)
