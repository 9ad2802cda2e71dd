"""A GraphModule made while another thread compiles, compiled once that has ended."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
from torch import fx

harness.warm_up()
harness.apply_patches("forward_from_src")
inside, leave = threading.Event(), threading.Event()
compiles = 0


def stand_still(gm: Any, example_inputs: Any) -> Any:
    inside.set()
    leave.wait(harness.WAIT_S)
    return gm


def count(gm: Any, example_inputs: Any) -> Any:
    global compiles
    compiles += 1
    return gm


def made() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("y"),)))
    return fx.GraphModule(torch.nn.Module(), graph)


x = torch.ones(3)
first = harness.Worker(lambda: torch.compile(lambda y: y + 1, backend=stand_still)(x))
inside.wait(harness.WAIT_S)
module = made()
leave.set()
first.finish()
faults: list[str] = []
if first.error is not None:
    faults.append(f"the other thread: {harness.first_line(first.error)}")
result = torch.compile(module, backend=count)(x)
if not torch.allclose(result, x.sin()):
    faults.append(f"wrong result {result}")
if compiles != 1:
    faults.append(f"a GraphModule made during another thread's compile: {compiles} compiles, not 1")
harness.verdict(faults)
