"""One thread exports a module that stands still in its forward; another calls the module."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import harness
import torch
from torch import nn

harness.warm_up()
harness.apply_patches("export_live_module")
warnings.filterwarnings("ignore")
faults = []
inside, leave = threading.Event(), threading.Event()
exporting = threading.local()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, y: torch.Tensor) -> Any:
        if getattr(exporting, "now", False):
            inside.set()
            leave.wait(harness.WAIT_S)
        return self.linear(y) * self.scale


net: Any = Net()
x = torch.ones(1, 2)
wanted = net(x).detach()


def export() -> Any:
    exporting.now = True
    return torch.export.export(net, (x,), strict=False)


exporter = harness.Worker(export)
inside.wait(harness.WAIT_S)
call = harness.Worker(lambda: net(x)).finish()
weight = type(net.linear.weight)
leave.set()
exporter.finish()
if call.error is not None:
    faults.append(f"a call meanwhile raised {harness.first_line(call.error)[:60]}")
elif type(call.result) is not torch.Tensor:
    faults.append(f"a call meanwhile returns a {type(call.result).__name__}")
if weight is not nn.Parameter:
    faults.append(f"the live module's weight is a {weight.__name__} meanwhile")
if exporter.error is not None:
    faults.append(f"the export raised {harness.first_line(exporter.error)[:60]}")
else:
    program = exporter.result
    if not torch.equal(program.module()(x), wanted):
        faults.append("the exported program is wrong")
    if program.state_dict["linear.weight"] is not net.linear.weight:
        faults.append("the exported program holds other parameters")
harness.verdict(faults)
