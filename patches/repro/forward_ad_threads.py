"""Two threads are inside `torch.func.jvp`; the first to begin ends first."""

from __future__ import annotations

import threading

import harness
import torch

harness.apply_patches("forward_ad_threads")
faults = []
x = torch.tensor([1.0, 2.0, 3.0])
one = torch.ones(3)
first_in, first_out = threading.Event(), threading.Event()
second_in, second_out = threading.Event(), threading.Event()


def first(y: torch.Tensor) -> torch.Tensor:
    first_in.set()
    first_out.wait(harness.WAIT_S)
    return y.sin()


def second(y: torch.Tensor) -> torch.Tensor:
    second_in.set()
    second_out.wait(harness.WAIT_S)
    return y.cos()


a = harness.Worker(lambda: torch.func.jvp(first, (x,), (one,))[1])
first_in.wait(harness.WAIT_S)
b = harness.Worker(lambda: torch.func.jvp(second, (x,), (one,))[1])
while b.is_alive() and not second_in.wait(0.05):
    pass
first_out.set()
a.finish()
second_out.set()
b.finish()
if a.error is not None or not torch.allclose(a.result, x.cos()):
    faults.append("the first jvp is wrong")
if b.error is None:
    if not torch.allclose(b.result, -x.sin()):
        faults.append(f"the second jvp silently returns {b.result.tolist()}")
elif "another thread is inside one" not in str(b.error):
    faults.append(f"the second jvp raised {harness.first_line(b.error)[:80]}")

# What must stay: nesting in one thread, and the next call in any.
got = torch.func.jvp(lambda y: torch.func.jvp(torch.sin, (y,), (one,))[1], (x,), (one,))[1]
if not torch.allclose(got, -x.sin()):
    faults.append("nested jvp in one thread is wrong")
later = harness.Worker(lambda: torch.func.jvp(torch.sin, (x,), (one,))[1]).finish()
if later.error is not None or not torch.allclose(later.result, x.cos()):
    faults.append("a later jvp in another thread is wrong")
harness.verdict(faults)
