"""One thread per device, each with a default device of its own, one compiled function."""

from __future__ import annotations

import threading

import harness
import torch

harness.warm_up()
harness.apply_patches("default_device")
faults = []
compiles: list[str] = []


def counting(gm: torch.fx.GraphModule, _: object) -> object:
    compiles.append("")
    return gm.forward


@torch.compile(backend=counting, dynamic=False)
def step(y: torch.Tensor) -> torch.Tensor:
    return y * 2 + torch.ones(3)


warm, chosen, done = (threading.Event() for _ in range(3))
x = torch.randn(3)


def on_cpu() -> tuple[int, int]:
    torch.set_default_device("cpu")
    step(x)
    before = len(compiles)
    warm.set()
    chosen.wait(harness.WAIT_S)
    for _ in range(2):
        torch.testing.assert_close(step(x), x * 2 + 1)
    done.set()
    return before, len(compiles)


def on_meta() -> str:
    warm.wait(harness.WAIT_S)
    torch.set_default_device("meta")  # stands for a second GPU
    chosen.set()
    done.wait(harness.WAIT_S)
    return torch.empty(1).device.type


a, b = harness.Worker(on_cpu), harness.Worker(on_meta)
a.finish()
b.finish()
if a.error is not None or b.error is not None:
    faults.append(f"raised {harness.first_line(a.error or b.error)[:80]}")
elif a.result[0] != a.result[1]:
    faults.append(f"{a.result[1] - a.result[0]} recompiles after another thread's choice")
if torch.utils._device.CURRENT_DEVICE is not None:
    faults.append("Dynamo takes the other thread's device for this thread's")
# What must stay: another default device in this thread is another compile.
if not faults:
    before = len(compiles)
    with torch.device("meta"):
        wanted = torch.ones(1).device.type
        torch.compile(lambda: torch.ones(1), backend=counting)()
    if wanted != "meta" or len(compiles) != before + 1:
        faults.append("a default device is not seen in its own thread")
harness.verdict(faults)
