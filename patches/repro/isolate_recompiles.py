"""A thread is in a compiled call when another one begins an isolated call. What the first compiles
after that must be found by later calls of the same function."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch

eval_frame: Any = torch._dynamo.eval_frame
if not hasattr(eval_frame, "set_eval_frame_isolate_recompiles_id"):
    harness.not_applicable("this torch has no isolate_recompiles")
harness.warm_up()
harness.apply_patches("isolate_recompiles")
x = torch.randn(4)
torch_compile: Any = torch.compile  # whose stub does not know isolate_recompiles yet
faults: list[str] = []
here, go, there, leave = (threading.Event() for _ in range(4))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def stand_still(reached: threading.Event, until: threading.Event) -> None:
    reached.set()
    until.wait(harness.WAIT_S)


compiles: list[Any] = []


def backend(graph: Any, _: Any) -> Any:
    compiles.append(graph)
    return graph.forward


def shared(y: Any) -> Any:
    y = y.sin()
    stand_still(here, go)
    return y.cos()


def isolated(y: Any) -> Any:
    y = y.sin()
    stand_still(there, leave)
    return y + 1


def filed(function: Any, region: int) -> int:
    return len(eval_frame._get_cache_entries_for_region(function, region))


compiled = torch_compile(shared, backend=backend)
first = harness.Worker(lambda: compiled(x))
here.wait(harness.WAIT_S)
region = torch_compile(isolated, backend="eager", isolate_recompiles=True)
second = harness.Worker(lambda: region(x))
there.wait(harness.WAIT_S)
go.set()
first.finish()
leave.set()
second.finish()
for worker in (first, second):
    if worker.error is not None:
        faults.append(f"a compiled call raised {harness.first_line(worker.error)[:90]}")
before = len(compiles)
compiled(x)
if len(compiles) != before:
    faults.append("what one thread compiled went into another thread's isolated region")


# What must stay: a region that is alone is isolated.
def alone(y: Any) -> Any:
    return y.tan()


lone = torch_compile(alone, backend="eager", isolate_recompiles=True)
lone(x)
if not filed(alone, lone._isolate_recompiles_id) or filed(alone, -1):
    faults.append("a lone isolated call is not isolated")
harness.verdict(faults)
