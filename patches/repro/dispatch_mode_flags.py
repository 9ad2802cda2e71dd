"""Two threads' dispatch modes overlap, and a compiled function is first called meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
import torch.utils._python_dispatch as dispatch

harness.warm_up()
harness.apply_patches("dispatch_mode_flags")
faults = []


class Mode(dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


mode: Any = Mode
first_in, second_in, first_out = (threading.Event() for _ in range(3))


def first() -> None:
    with mode():
        first_in.set()
        second_in.wait(harness.WAIT_S)
    first_out.set()


def second() -> None:
    first_in.wait(harness.WAIT_S)
    with mode():
        second_in.set()
        first_out.wait(harness.WAIT_S)


# 1. A first call in this thread while another is inside a mode.
inside, leave = threading.Event(), threading.Event()


def hold() -> None:
    with mode():
        inside.set()
        leave.wait(harness.WAIT_S)


graphs: list[str] = []


def counting(gm: torch.fx.GraphModule, _: object) -> object:
    graphs.append("")
    return gm.forward


holder = harness.Worker(hold)
inside.wait(harness.WAIT_S)
if dispatch.is_in_torch_dispatch_mode():
    faults.append("a mode of another thread seems active here")
torch.compile(lambda y: y + 1, backend=counting)(torch.ones(2))
leave.set()
holder.finish()
if not graphs:
    faults.append("a function first called meanwhile ran eagerly")

# 2. Two that overlap: the first to begin ends first.
a, b = harness.Worker(first), harness.Worker(second)
a.finish()
b.finish()
if dispatch._is_in_torch_dispatch_mode or dispatch.is_in_torch_dispatch_mode():
    faults.append("after two overlapping modes one seems active for ever")

# 3. What must stay: the thread inside is inside.
with mode():
    if not dispatch.is_in_torch_dispatch_mode():
        faults.append("a mode is not seen in its own thread")
harness.verdict(faults)
