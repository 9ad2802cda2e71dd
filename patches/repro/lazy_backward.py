"""Two threads run the first backward of one compiled graph at the same time."""

from __future__ import annotations

import contextlib
import threading

import harness
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

harness.warm_up()
harness.apply_patches("lazy_backward")
faults = []


def graph(gm: torch.fx.GraphModule, _: object) -> object:
    return make_boxed_func(gm.forward)


# 1. Whoever compiles waits a moment for a second one to arrive in the compiler.
compiles: list[int] = []
together = threading.Barrier(2)


def meet(gm: torch.fx.GraphModule, _: object) -> object:
    compiles.append(threading.get_ident())
    with contextlib.suppress(threading.BrokenBarrierError):
        together.wait(2)
    return make_boxed_func(gm.forward)


compiled = torch.compile(
    lambda x: x.sin() * x, backend=aot_autograd(fw_compiler=graph, bw_compiler=meet)
)
leaves = [torch.randn(4, requires_grad=True) for _ in range(2)]
losses = [compiled(x).sum() for x in leaves]
workers = [harness.Worker(loss.backward) for loss in losses]
for worker in workers:
    worker.finish()
    if worker.error is not None:
        faults.append(f"backward raised {harness.first_line(worker.error)[:80]}")
if len(compiles) != 1:
    faults.append(f"one backward graph was compiled {len(compiles)} times")
for x in leaves:
    if x.grad is None or not torch.allclose(x.grad, (x.cos() * x + x.sin()).detach()):
        faults.append("a gradient is wrong")


# 2. A backward compiler that waits for another graph's backward must not be held up by it.
first_in, second_done = threading.Event(), threading.Event()


def patient(gm: torch.fx.GraphModule, _: object) -> object:
    first_in.set()
    if not second_done.wait(10):
        faults.append("the backward of another graph had to wait")
    return make_boxed_func(gm.forward)


one = torch.compile(
    lambda x: x.cos() * x, backend=aot_autograd(fw_compiler=graph, bw_compiler=patient)
)
two = torch.compile(
    lambda x: x.exp() * x, backend=aot_autograd(fw_compiler=graph, bw_compiler=graph)
)
a, b = one(leaves[0]).sum(), two(leaves[1]).sum()
slow = harness.Worker(a.backward)
first_in.wait(harness.WAIT_S)
quick = harness.Worker(b.backward).finish()
second_done.set()
slow.finish()
faults += [f"raised {harness.first_line(w.error)[:80]}" for w in (slow, quick) if w.error]
harness.verdict(faults)
