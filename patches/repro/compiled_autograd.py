"""One thread stands inside its compiled-autograd context; another enters one and runs backward."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
from torch._dynamo import compiled_autograd

harness.warm_up()
harness.apply_patches("compiled_autograd")
faults = []
first_in, second_in, first_out = (threading.Event() for _ in range(3))


def compiler(graph: torch.fx.GraphModule) -> object:
    return torch.compile(graph, backend="eager")


def gradient() -> float:
    y: Any = torch.tensor(3.0, requires_grad=True)
    (y * y).backward()
    assert y.grad is not None
    return float(y.grad)


def first() -> float:
    try:
        with compiled_autograd._enable(compiler):
            first_in.set()
            second_in.wait(2)  # where contexts wait for each other, the second does not come
            return gradient()
    finally:
        first_out.set()


def second() -> float:
    first_in.wait(harness.WAIT_S)
    with compiled_autograd._enable(compiler):
        second_in.set()
        first_out.wait(harness.WAIT_S)
        return gradient()


a, b = harness.Worker(first), harness.Worker(second)
a.finish()
b.finish()
for name, worker in (("first", a), ("second", b)):
    if worker.error is not None:
        faults.append(f"the {name} thread raised {harness.first_line(worker.error)[:80]}")
    elif worker.result != 6:
        faults.append(f"the {name} thread's gradient is {worker.result}")
if compiled_autograd.compiled_autograd_enabled or compiled_autograd.depth:
    faults.append("compiled autograd stays on")
elif a.error is None and torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)[0]:
    faults.append("a compiler stays installed")
harness.verdict(faults)
