"""Ten threads make a function's first call together; then there is a new shape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import harness
import torch

harness.warm_up()
harness.apply_patches("lazy_graph_module", "compile_single_flight")
faults = []
THREADS = 10
compiles: list[str] = []


def counting(gm: torch.fx.GraphModule, _: object) -> object:
    compiles.append("")
    time.sleep(0.05)  # long enough for all the others to come to the lock
    return gm.forward


def herd(call: Callable[[], torch.Tensor], want: torch.Tensor) -> None:
    together = threading.Barrier(THREADS)

    def one() -> torch.Tensor:
        together.wait(harness.WAIT_S)
        return call()

    for worker in [harness.Worker(one) for _ in range(THREADS)]:
        worker.finish()
        if worker.error is not None:
            faults.append(f"a call raised {harness.first_line(worker.error)[:80]}")
        elif not torch.equal(worker.result, want):
            faults.append("a call returned a wrong result")


x = torch.randn(4)
plain = torch.compile(lambda y: y.sin() + 1, backend=counting, dynamic=False)
herd(lambda: plain(x), x.sin() + 1)
if len(compiles) != 1:
    faults.append(f"{THREADS} threads compiled one function {len(compiles)} times")
before = len(compiles)
plain(torch.randn(5))
if len(compiles) == before:
    faults.append("a new shape then runs eager, for good")


# Each part of a function with a graph break is looked up, and compiled, for itself.
def broken_up(y: torch.Tensor) -> torch.Tensor:
    y = y.cos()
    torch._dynamo.graph_break()
    return y + 2


compiles.clear()
parts = torch.compile(broken_up, backend=counting, dynamic=False)
herd(lambda: parts(x), x.cos() + 2)
if len(compiles) != 2:
    faults.append(f"{THREADS} threads compiled a function of two parts {len(compiles)} times")
harness.verdict(faults)
