"""Replicas of compiled modules, with other weights for another device's, as DataParallel makes."""

from __future__ import annotations

import sys
from typing import Any

import harness
import torch
from torch import nn

sys.setrecursionlimit(1500)
harness.warm_up()
harness.apply_patches("data_parallel")
faults: list[str] = []
x = torch.ones(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, y: torch.Tensor) -> Any:
        return self.linear(y)


def net() -> Any:
    return Net()


def replicate(module: Any, scale: float) -> Any:
    """The steps of torch.nn.parallel.replicate; CPU weights times `scale` for another device's."""
    modules = list(module.modules())
    index = {m: i for i, m in enumerate(modules)}
    own = [(dict(m._modules), dict(m._parameters)) for m in modules]
    replicas = [m._replicate_for_data_parallel() for m in modules]
    for (children, weights), replica in zip(own, replicas, strict=True):
        for key, child in children.items():
            replica._modules[key] = replicas[index[child]]
        for key, weight in weights.items():
            setattr(replica, key, None if weight is None else weight.detach() * scale)
    return replicas[0]


def expect(what: str, call: Any, wanted: float) -> None:
    worker = harness.Worker(call).finish()
    if worker.error is not None:
        faults.append(f"{what} raised {harness.first_line(worker.error)[:60]}")
    elif worker.result.tolist() != [[wanted, wanted]]:
        faults.append(f"{what} gives {worker.result[0, 0]:.0f}, not {wanted:.0f}")


in_place: Any = net()
in_place.compile(backend="eager")
in_place(x)
expect("a replica of module.compile()", lambda: replicate(in_place, 3.0)(x), 6)
expect("the original of module.compile()", lambda: in_place(x), 2)
model = net()
compiled: Any = torch.compile(model, backend="eager")
compiled(x)
expect("a replica of torch.compile(module)", lambda: replicate(compiled, 3.0)(x), 6)
expect("its original", lambda: model(x), 2)
expect("a replica of an eager module", lambda: replicate(net(), 3.0)(x), 6)
harness.verdict(faults)
