"""One thread stands inside its functional call of a module; another calls the same module so."""

from __future__ import annotations

import threading

import harness
import torch
from torch import nn

harness.warm_up()
harness.apply_patches("functional_call")
faults = []
first_in, second_in, first_out = (threading.Event() for _ in range(3))
order = threading.local()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        if order.number == 1:
            first_in.set()
            second_in.wait(2)  # where calls wait for each other, the second does not come
        elif order.number == 2:
            second_in.set()
            first_out.wait(harness.WAIT_S)
        return y * self.weight


net = Net()
x = torch.ones(2)


def first() -> object:
    order.number = 1
    try:
        return torch.func.functional_call(net, {"weight": torch.full((2,), 3.0)}, (x,))
    finally:
        first_out.set()


def second() -> object:
    order.number = 2
    first_in.wait(harness.WAIT_S)
    return torch.func.functional_call(net, {"weight": torch.full((2,), 5.0)}, (x,))


a, b = harness.Worker(first), harness.Worker(second)
a.finish()
b.finish()
for name, worker, wanted in (("first", a, 3.0), ("second", b, 5.0)):
    if worker.error is not None:
        faults.append(f"the {name} call raised {harness.first_line(worker.error)[:60]}")
    elif not torch.equal(worker.result, x * wanted):
        faults.append(f"the {name} call used weights {worker.result[0]:.0f}, not {wanted:.0f}")
if not isinstance(net.weight, nn.Parameter) or net.weight.any():
    faults.append("the module is left with weights that are not its own")
linear = nn.Linear(2, 2, bias=False)
compiled = torch.compile(
    lambda w: torch.func.functional_call(linear, {"weight": w}, (x,)),
    backend="eager",
    fullgraph=True,
)
if not faults and not torch.equal(compiled(torch.full((2, 2), 7.0)), x * 14):
    faults.append("a compiled call is wrong")
harness.verdict(faults)
