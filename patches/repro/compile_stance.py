"""One thread is in a `set_stance` block; another one calls a compiled function."""

from __future__ import annotations

import gc
import threading
from typing import Any

import harness
import torch

harness.warm_up()
harness.apply_patches("compile_stance")
x = torch.randn(4)
faults: list[str] = []
compiled: list[Any] = []


def backend(graph: Any, _: Any) -> Any:
    compiled.append(graph)
    return graph.forward


def block(stance: str, inside: threading.Event, leave: threading.Event) -> None:
    with torch.compiler.set_stance(stance):
        inside.set()
        leave.wait(harness.WAIT_S)


# 1. A block in one thread, a compiled call in another.
inside, leave = threading.Event(), threading.Event()
holder = harness.Worker(lambda: block("force_eager", inside, leave))
inside.wait(harness.WAIT_S)
harness.Worker(lambda: torch.compile(lambda y: y.sin(), backend=backend)(x)).finish()
leave.set()
holder.finish()
if not compiled:
    faults.append("a compiled call runs eager because of another thread's block")

# 2. Blocks that overlap: the first to begin ends first.
events = [threading.Event() for _ in range(4)]
first = harness.Worker(lambda: block("force_eager", events[0], events[1]))
events[0].wait(harness.WAIT_S)
second = harness.Worker(lambda: block("force_eager", events[2], events[3]))
events[2].wait(harness.WAIT_S)
events[1].set()
first.finish()
events[3].set()
second.finish()
if torch._dynamo.eval_frame._stance.stance != "default":
    faults.append("after two overlapping blocks the stance stays force_eager")
    torch._dynamo.eval_frame._stance = type(torch._dynamo.eval_frame._stance)()

# 3. What must stay: a plain call is for all threads, a block for its own.
torch.compiler.set_stance("force_eager")
gc.collect()
del compiled[:]
harness.Worker(lambda: torch.compile(lambda y: y.cos(), backend=backend)(x)).finish()
if compiled:
    faults.append("a plain call does not reach other threads")
torch.compiler.set_stance("default")


def own() -> None:
    with torch.compiler.set_stance("force_eager"):
        torch.compile(lambda y: y.tan(), backend=backend)(x)


harness.Worker(own).finish()
if compiled:
    faults.append("a block does not hold in its own thread")
harness.verdict(faults)
