"""Two threads load an exported program; one is held inside, where it reads the graph."""

from __future__ import annotations

import io
import threading
from typing import Any

import harness
import torch
from torch._export.serde import serialize

harness.apply_patches("export_load")
faults = []
x = torch.randn(3)


class Model(torch.nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.sin() + 1


saved = io.BytesIO()
torch.export.save(torch.export.export(Model(), (x,)), saved)
inside, leave = threading.Event(), threading.Event()
stock: Any = serialize.GraphModuleDeserializer.deserialize_graph
held: list[int] = []


def hold_the_first(self: object, *args: Any, **kwargs: Any) -> Any:
    if not held:
        held.append(threading.get_ident())
        inside.set()
        leave.wait(harness.WAIT_S)
    return stock(self, *args, **kwargs)


setattr(serialize.GraphModuleDeserializer, "deserialize_graph", hold_the_first)  # noqa: B010


def load() -> Any:
    return torch.export.load(io.BytesIO(saved.getvalue())).module()(x)


first = harness.Worker(load)
inside.wait(harness.WAIT_S)
second = harness.Worker(load).finish()
leave.set()
for worker in (first.finish(), second):
    if worker.error is not None:
        faults.append(f"load raised {harness.first_line(worker.error)[:80]}")
    elif not torch.equal(worker.result, x.sin() + 1):
        faults.append("a loaded program gives a wrong result")
harness.verdict(faults)
