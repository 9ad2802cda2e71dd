"""Two threads, each in the first backward of a model of its own: the second compiles meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
from torch._dynamo import utils
from torch._dynamo.backends.common import aot_autograd

if hasattr(utils, "_metrics_context_tls"):
    harness.not_applicable("the figures are per thread in this torch")
harness.warm_up()
harness.apply_patches("metrics_context")
inside, leave = threading.Event(), threading.Event()


def as_it_is(gm: Any, example_inputs: Any) -> Any:
    return gm


def stand_still(gm: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(harness.WAIT_S)
    return gm


def step(bw_compiler: Any) -> torch.Tensor:
    model = torch.compile(
        lambda y: y.sin().sum(), backend=aot_autograd(fw_compiler=as_it_is, bw_compiler=bw_compiler)
    )
    x = torch.ones(3, requires_grad=True)
    model(x).backward()
    assert x.grad is not None
    return x.grad


first = harness.Worker(lambda: step(stand_still))
inside.wait(harness.WAIT_S)
figures = utils.get_metrics_context()
faults: list[str] = []
if figures.in_progress():
    faults.append("a thread that compiles nothing is in the midst of another's compile")
second = harness.Worker(lambda: step(as_it_is)).finish()
leave.set()
first.finish()
for name, worker in (("first", first), ("second", second)):
    if worker.error is not None:
        text = str(worker.error).strip().splitlines()[-1]
        faults.append(f"the {name} backward: {type(worker.error).__name__}: {text}")
    elif not torch.allclose(worker.result, torch.ones(3).cos()):
        faults.append(f"the {name} backward is wrong: {worker.result}")
harness.verdict(faults)
