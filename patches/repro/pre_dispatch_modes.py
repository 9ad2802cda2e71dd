"""A thread stands in a trace before dispatch, as exports make; others trace and compile."""

from __future__ import annotations

import threading

import harness
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

harness.warm_up()
# Overlapping traces, and compiles beside them, would fail on these faults first.
harness.apply_always("fx_patcher", "fx_tracing_flag")
harness.apply_patches("pre_dispatch_modes")
faults: list[str] = []
x = torch.randn(4)
inside, leave = threading.Event(), threading.Event()


def held(y: torch.Tensor) -> torch.Tensor:
    inside.set()
    leave.wait(harness.WAIT_S)
    return y.sin() + 1


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


first = harness.Worker(lambda: make_fx(held, pre_dispatch=True)(x))
inside.wait(harness.WAIT_S)
if get_proxy_mode() is not None:
    faults.append("a thread that traces nothing finds the tracer of another")
second = harness.Worker(
    lambda: make_fx(lambda y: y.cos(), tracing_mode="symbolic", pre_dispatch=True)(x)
).finish()
if second.error is not None:
    faults.append(f"another trace raised {harness.first_line(second.error)[:80]}")
compiled = torch.compile(lambda y: y.tan() * y.shape[0], backend="eager", dynamic=True)
third = harness.Worker(lambda: compiled(x)).finish()
if third.error is not None:
    faults.append(f"a compile raised {harness.first_line(third.error)[:80]}")
leave.set()
first.finish()
if first.error is not None:
    faults.append(f"the trace itself raised {harness.first_line(first.error)[:80]}")
elif targets(first.result.graph) != ["aten.sin.default", "aten.add.Tensor"]:
    faults.append(f"the trace itself has {targets(first.result.graph)}")
harness.verdict(faults)
