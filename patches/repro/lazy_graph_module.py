"""Two threads make the first call of one lazily generated graph module."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import harness
import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

harness.apply_patches("lazy_graph_module")
faults = []
x = torch.randn(4)


def function(a: torch.Tensor) -> torch.Tensor:
    return (a.sin() * 2).cos() + a


generated: list[int] = []
together = threading.Barrier(2)


def meet(body: list[str]) -> list[str]:
    """Called in the middle of generating: waits a moment for a second thread to come here."""
    generated.append(threading.get_ident())
    with contextlib.suppress(threading.BrokenBarrierError):
        together.wait(2)
    return body


def transformer(_: object) -> Callable[[list[str]], list[str]]:
    return meet


traced = fx.symbolic_trace(function)
traced.graph.on_generate_code(transformer)
lazy = _LazyGraphModule.from_graphmodule(traced)
calls = [harness.Worker(lambda: lazy(x)) for _ in range(2)]
for call in calls:
    call.finish()
    if call.error is not None:
        faults.append(f"raised {harness.first_line(call.error)[:80]}")
    elif not torch.equal(call.result, function(x)):
        faults.append("wrong result")
if len(generated) != 1:
    faults.append(f"the code of one graph was generated {len(generated)} times at once")
harness.verdict(faults)
