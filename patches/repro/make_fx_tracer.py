"""One thread traces a function with a `cond`; another thread's trace begins and ends meanwhile."""

from __future__ import annotations

import threading

import harness
import torch
from torch.fx.experimental.proxy_tensor import make_fx

harness.warm_up()
harness.apply_always("fx_patcher")  # overlapping traces would fail on its fault first
harness.apply_patches("make_fx_tracer")
x = torch.randn(4)
inside, other_inside, leave, other_leave = (threading.Event() for _ in range(4))


def branches(y: torch.Tensor) -> torch.Tensor:
    inside.set()
    leave.wait(harness.WAIT_S)
    chosen: torch.Tensor = torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))
    return chosen


def plain(y: torch.Tensor) -> torch.Tensor:
    other_inside.set()
    other_leave.wait(harness.WAIT_S)
    return y.tan()


# Begun before the first and ended inside it: it restores "no trace".
other = harness.Worker(lambda: make_fx(plain)(x))
other_inside.wait(harness.WAIT_S)
first = harness.Worker(lambda: make_fx(branches, tracing_mode="symbolic")(x))
inside.wait(harness.WAIT_S)
other_leave.set()
other.finish()
leave.set()
first.finish()

faults: list[str] = []
if other.error is not None:
    faults.append(f"the other trace raised {harness.first_line(other.error)[:90]}")
if first.error is not None:
    faults.append(f"a trace with cond raised {harness.first_line(first.error)[:110]}")
elif not any(node.target is torch.ops.higher_order.cond for node in first.result.graph.nodes):
    faults.append("the cond is not in its own trace")
harness.verdict(faults)
