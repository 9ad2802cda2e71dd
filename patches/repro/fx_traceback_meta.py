"""One thread traces and keeps node metadata; another one has metadata of its own meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

harness.warm_up()
harness.apply_patches("fx_traceback_meta")
x = torch.randn(4)
inside, marked, leave = (threading.Event() for _ in range(3))


def traced(y: torch.Tensor) -> torch.Tensor:
    inside.set()
    marked.wait(harness.WAIT_S)
    return y.sin()


def trace() -> Any:
    with fx_traceback.preserve_node_meta():
        fx_traceback.set_stack_trace(["mine"])
        return make_fx(traced)(x)


def mark() -> None:
    with fx_traceback.preserve_node_meta():
        fx_traceback.set_stack_trace(["theirs"])
        marked.set()
        leave.wait(harness.WAIT_S)


tracing = harness.Worker(trace)
inside.wait(harness.WAIT_S)
marking = harness.Worker(mark)
tracing.finish()
leave.set()
marking.finish()

faults = []
for worker in (tracing, marking):
    if worker.error is not None:
        faults.append(f"raised {harness.first_line(worker.error)[:80]}")
if not faults:
    traces = [n.stack_trace for n in tracing.result.graph.nodes if n.op == "call_function"]
    if traces != ["mine"]:
        faults.append(f"the node's stack trace is {traces}, another thread's")
if fx_traceback.has_preserved_node_meta():
    faults.append("node metadata stays on for good")
if fx_traceback.current_meta:
    faults.append(f"metadata stays behind: {sorted(fx_traceback.current_meta)}")
harness.verdict(faults)
