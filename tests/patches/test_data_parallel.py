from __future__ import annotations

from typing import Any

import pytest
import torch
from interleaving import Worker
from torch import nn

x = torch.ones(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, y: Any) -> Any:
        return self.linear(y)


def net() -> Any:
    return Net()


def replicate(module: Any, scale: float) -> Any:
    """torch.nn.parallel.replicate without a second device."""
    modules = list(module.modules())
    index = {m: i for i, m in enumerate(modules)}
    own = [(dict(m._modules), dict(m._parameters)) for m in modules]
    replicas = [m._replicate_for_data_parallel() for m in modules]
    for (children, weights), replica in zip(own, replicas, strict=True):
        for key, child in children.items():
            setattr(replica, key, replicas[index[child]])
        for key, weight in weights.items():
            setattr(replica, key, None if weight is None else weight.detach() * scale)
    return replicas[0]


class Counting:
    def __init__(self) -> None:
        self.compiles = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.compiles += 1
        return graph.forward


def test_replicas_of_the_wrapper(patched: None) -> None:
    model, backend = net(), Counting()
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    replicas = [replicate(compiled, scale) for scale in (2.0, 3.0)]
    workers = [Worker(lambda r=r: r(x).tolist()) for r in replicas]
    assert [w.get() for w in workers] == [[[4, 4]], [[6, 6]]]
    assert backend.compiles >= 2  # compiled, not eager
    assert model(x).tolist() == compiled(x).tolist() == [[2, 2]]
    assert isinstance(model.linear.weight, nn.Parameter)


def test_replicas_of_a_module_compiled_in_place(patched: None) -> None:
    model, backend = net(), Counting()
    model.compile(backend=backend)
    model(x)
    before = backend.compiles
    assert replicate(model, 3.0)(x).tolist() == [[6, 6]]
    assert backend.compiles > before
    assert model(x).tolist() == [[2, 2]]


def test_a_compiler_that_cannot_be_told_is_said(patched: None) -> None:
    model = net()
    model._compiled_call_impl = lambda y: y
    with pytest.warns(UserWarning, match="runs eagerly"):
        replica = replicate(model, 3.0)
    assert replica(x).tolist() == [[6, 6]]


def test_replicas_of_eager_modules_are_as_ever(patched: None) -> None:
    assert replicate(net(), 3.0)(x).tolist() == [[6, 6]]
