from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import nn
from torch.func import functional_call

x = torch.ones(2)


class Net(nn.Module):
    """Stands still in the first call's forward until another is inside or has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, y: Any, inside: Any = None, leave: Any = None) -> Any:
        if inside is not None:
            inside.set()
            assert leave.wait(WAIT_S)
        return y * self.weight


def weights(value: float) -> dict[str, Any]:
    return {"weight": torch.full((2,), value)}


def test_calls_of_one_module_wait_for_each_other(patched: None) -> None:
    net, inside, leave = Net(), threading.Event(), threading.Event()
    first = Worker(lambda: functional_call(net, weights(3), (x, inside, leave)))
    assert inside.wait(WAIT_S)
    second = Worker(lambda: functional_call(net, weights(5), (x,)))
    second.join(0.2)
    assert second.is_alive()
    leave.set()
    assert first.get().tolist() == [3, 3]
    assert second.get().tolist() == [5, 5]
    assert net.weight.tolist() == [0, 0]


def test_calls_of_different_modules_do_not(patched: None) -> None:
    net, inside, leave = Net(), threading.Event(), threading.Event()
    first = Worker(lambda: functional_call(net, weights(3), (x, inside, leave)))
    assert inside.wait(WAIT_S)
    assert functional_call(copy.deepcopy(net.eval()), weights(5), (x,)).tolist() == [5, 5]
    leave.set()
    assert first.get().tolist() == [3, 3]


def test_a_call_inside_a_call_of_the_same_thread_goes_through(patched: None) -> None:
    class Outer(nn.Module):
        def forward(self, y: Any) -> Any:
            return functional_call(net, weights(2), (y,)) + functional_call(net, weights(4), (y,))

    net = Net()
    assert functional_call(Outer(), {}, (x,)).tolist() == [6, 6]


def test_a_call_that_can_never_be_served_raises(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchcompat.patches.functional_call._WAIT_S", 0.1)
    net, inside, leave = Net(), threading.Event(), threading.Event()
    first = Worker(lambda: functional_call(net, weights(3), (x, inside, leave)))
    assert inside.wait(WAIT_S)
    with pytest.raises(RuntimeError, match="Give each thread a copy of the module"):
        functional_call(net, weights(5), (x,))
    leave.set()
    first.get()


def test_compiled_calls_and_gradients_are_as_ever(patched: None) -> None:
    linear = nn.Linear(2, 2, bias=False)
    call = torch.compile(
        lambda w: functional_call(linear, {"weight": w}, (x,)), backend="eager", fullgraph=True
    )
    assert call(torch.full((2, 2), 7.0)).tolist() == [14, 14]
    gradient = torch.func.grad(lambda w: functional_call(linear, {"weight": w}, (x,)).sum())
    assert gradient(torch.zeros(2, 2)).tolist() == [[1, 1], [1, 1]]
