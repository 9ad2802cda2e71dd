"""FX traces of one thread beside traces, eager module calls and compiles of others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import harness
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

harness.warm_up()
harness.apply_patches("fx_tracing_flag", "fx_patcher")
faults = []
x = torch.randn(4)
module_call = nn.Module.__call__


class Gate(nn.Module):
    """Two submodules; between them the trace stands still until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        y = self.first(y)
        self.inside.set()
        self.leave.wait(harness.WAIT_S)
        y = self.last(y) * math.sqrt(self.last.in_features)
        return y


def started(gate: Gate) -> harness.Worker:
    worker = harness.Worker(lambda: fx.symbolic_trace(gate))
    gate.inside.wait(harness.WAIT_S)
    return worker


def ended(name: str, gate: Gate, worker: harness.Worker) -> None:
    """The trace must have given the graph that it gives alone: both submodules as calls."""
    gate.leave.set()
    worker.finish()
    if worker.error is not None:
        faults.append(f"{name}: {harness.first_line(worker.error)[:90]}")
        return
    calls = [n.target for n in worker.result.graph.nodes if n.op == "call_module"]
    if calls != ["first", "last"]:
        faults.append(f"{name}: the graph changed silently, its module calls are {calls}")


def quiet(name: str, work: Callable[[], object]) -> None:
    """`work` in a thread that has nothing to do with the trace."""
    other = harness.Worker(work).finish()
    if other.error is not None:
        faults.append(f"{name}: {harness.first_line(other.error)[:90]}")


# 1. Eager module calls beside a trace.
gate = Gate()
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
trace = started(gate)
quiet("eager module call", lambda: model(x))
ended("trace beside an eager call", gate, trace)

# 2. A compile beside a trace.
gate = Gate()
trace = started(gate)
quiet("compile", lambda: torch.compile(model, backend="eager", fullgraph=True)(x))
ended("trace beside a compile", gate, trace)

# 3. Two traces, the first to begin ends first.
one, two = Gate(), Gate()
trace_one, trace_two = started(one), started(two)
ended("first of two traces", one, trace_one)
ended("second of two traces", two, trace_two)
if nn.Module.__call__ is not module_call:
    faults.append("nn.Module.__call__ stays a dead tracer's function")
    setattr(nn.Module, "__call__", module_call)  # noqa: B010 - a method, to mypy

# 4. The same with make_fx, whose assertion hides the error behind it.
first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()


def first(y: torch.Tensor) -> torch.Tensor:
    first_in.set()
    second_in.wait(harness.WAIT_S)
    return y.cos()


def second(y: torch.Tensor) -> torch.Tensor:
    second_in.set()
    first_out.wait(harness.WAIT_S)
    return y.cos()


a = harness.Worker(lambda: make_fx(first)(x))
first_in.wait(harness.WAIT_S)
b = harness.Worker(lambda: make_fx(second)(x))
a.finish()
first_out.set()
b.finish()
for worker in (a, b):
    if worker.error is not None:
        faults.append(f"overlapping make_fx: {harness.first_line(worker.error)[:90]}")
harness.verdict(faults)
