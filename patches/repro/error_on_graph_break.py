"""One thread is inside `error_on_graph_break(True)`; another compiles a function that breaks."""

from __future__ import annotations

import threading

import harness
import torch

if not hasattr(torch._dynamo, "error_on_graph_break"):
    harness.not_applicable("this torch has no error_on_graph_break")
harness.warm_up()
harness.apply_patches("error_on_graph_break")
x = torch.randn(4)
faults = []


@torch.compile(backend="eager")
def breaks(y: torch.Tensor) -> torch.Tensor:
    y = y.sin()
    torch._dynamo.graph_break()
    return y + 1


# 1. A strict block in one thread, a compile that may break in another.
inside, leave = threading.Event(), threading.Event()


def strict() -> None:
    with torch._dynamo.error_on_graph_break(True):
        inside.set()
        leave.wait(harness.WAIT_S)


holder = harness.Worker(strict)
inside.wait(harness.WAIT_S)
call = harness.Worker(lambda: breaks(x)).finish()
leave.set()
holder.finish()
if call.error is not None:
    faults.append(f"a graph break in another thread raised {harness.first_line(call.error)[:60]}")

# 2. Two strict blocks that overlap: the first to begin ends first.
first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()


def first() -> None:
    with torch._dynamo.error_on_graph_break(True):
        first_in.set()
        second_in.wait(harness.WAIT_S)


def second() -> None:
    first_in.wait(harness.WAIT_S)
    with torch._dynamo.error_on_graph_break(True):
        second_in.set()
        first_out.wait(harness.WAIT_S)


a, b = harness.Worker(first), harness.Worker(second)
a.finish()
first_out.set()
b.finish()
if torch._dynamo.utils._error_on_graph_break:
    faults.append("after two overlapping blocks graph breaks are errors for good")

# 3. What must stay: in its own thread the block still forbids.
if not faults:
    torch._dynamo.reset()

    def own() -> None:
        with torch._dynamo.error_on_graph_break(True):
            breaks(x)

    if harness.Worker(own).finish().error is None:
        faults.append("a graph break inside the block's own thread is no longer an error")
harness.verdict(faults)
