"""One thread traces with FX; another calls a function compiled before the patches were applied."""

from __future__ import annotations

import threading

import harness
import torch
from torch.fx.experimental.proxy_tensor import make_fx

harness.warm_up()
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
x = torch.randn(4)
compiled(x)  # made and used before apply(): it holds the check in its closure
harness.apply_patches("fx_tracing_flag")
faults = []


def refused(error: BaseException | None) -> bool:
    return error is not None and "using FX to symbolically trace" in str(error)


# 1. A trace in one thread, a compiled call in another.
inside, leave = threading.Event(), threading.Event()


def slow(y: torch.Tensor) -> torch.Tensor:
    inside.set()
    leave.wait(harness.WAIT_S)
    return y.cos()


tracing = harness.Worker(lambda: make_fx(slow)(x))
inside.wait(harness.WAIT_S)
call = harness.Worker(lambda: compiled(x)).finish()
leave.set()
tracing.finish()
if refused(call.error):
    faults.append(f"a compiled call in another thread raised {harness.first_line(call.error)[:60]}")

# 2. Two traces that overlap: the first to begin ends first.
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
try:
    compiled(x)
except RuntimeError as e:
    if refused(e):
        faults.append("after two overlapping traces every compiled call raises")


# 3. What must stay: a trace over a compiled function in the same thread is refused.
def deliberate() -> None:
    make_fx(lambda y: compiled(y) + 1)(x)


if not faults:
    own = harness.Worker(deliberate).finish()
    if not refused(own.error):
        faults.append("a deliberate trace over a compiled function is no longer refused")
harness.verdict(faults)
