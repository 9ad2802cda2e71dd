from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import nn

from torchcompat.patches.export_live_module import copied

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
x = torch.ones(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.tied = self.linear
        self.plain = torch.full((2,), 2.0)
        self.register_buffer("scale", torch.ones(2))
        self.exporter = 0

    def forward(self, y: Any) -> Any:
        if threading.get_ident() == self.exporter:
            inside.set()
            assert leave.wait(WAIT_S)
        return self.tied(y) * self.scale + self.plain


inside, leave = threading.Event(), threading.Event()


@pytest.mark.parametrize("strict", [False])
def test_the_module_can_be_used_meanwhile(patched: None, strict: bool) -> None:
    net: Any = Net()
    wanted = net(x).detach()
    inside.clear(), leave.clear()

    def export() -> Any:
        net.exporter = threading.get_ident()
        return torch.export.export(net, (x,), strict=strict)

    worker = Worker(export)
    assert inside.wait(WAIT_S)
    live = net(x)
    assert type(net.linear.weight) is nn.Parameter
    leave.set()
    program = worker.get()
    assert type(live) is torch.Tensor
    torch.testing.assert_close(live, wanted, check_stride=False)
    torch.testing.assert_close(program.module()(x), wanted)
    assert program.state_dict["linear.weight"] is net.linear.weight
    assert program.state_dict["scale"] is net.scale


def test_a_module_that_cannot_be_copied_is_exported_in_place(patched: None) -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()
            self.linear = nn.Linear(2, 2)

        def forward(self, y: Any) -> Any:
            return self.linear(y)

    locked = Locked()
    with pytest.warns(UserWarning, match="Locked cannot be copied"):
        program = Worker(lambda: torch.export.export(locked, (x,), strict=False)).get()
    torch.testing.assert_close(program.module()(x), locked(x))


def test_a_program_that_is_exported_again_keeps_its_checks_of_inputs(patched: None) -> None:
    class Total(nn.Module):
        def forward(self, y: Any) -> Any:
            return y.sum(0)

    first = torch.export.export(Total(), (torch.ones(3, 2),), strict=False).module()
    refusals = []
    with pytest.raises((RuntimeError, AssertionError)) as refusal:
        first(torch.ones(5, 2))
    refusals.append(str(refusal.value))
    hooks = len(first._forward_pre_hooks)
    copy = copied(first)
    assert (len(copy._forward_pre_hooks), set(vars(first)) - set(vars(copy))) == (hooks, set())
    with pytest.raises((RuntimeError, AssertionError)) as refusal:
        copy(torch.ones(5, 2))
    refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]
