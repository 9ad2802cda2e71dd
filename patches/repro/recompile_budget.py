"""Threads with modes of their own, instances of a class, and unrelated models share a limit."""

from __future__ import annotations

import harness
import torch
from torch import nn

harness.warm_up()
harness.apply_patches("recompile_budget")
faults: list[str] = []
compiles: list[str] = []


def counting(gm: torch.fx.GraphModule, _: object) -> object:
    compiles.append("")
    return gm.forward


def expect(wanted: int, what: str) -> None:
    if len(compiles) != wanted:
        faults.append(f"{what}: {len(compiles)} of {wanted} compiled, the rest runs eager")
    compiles.clear()


# 1. Four threads, one after the other, each with its own modes and four shapes.
f = torch.compile(lambda x: x.sin(), backend=counting, dynamic=False)


def serve(which: int) -> None:
    with (
        torch.set_grad_enabled(which % 2 == 0),
        torch.autocast("cpu", enabled=which < 2, dtype=torch.bfloat16),
    ):
        for n in range(3, 7):
            f(torch.ones(n))


for which in range(4):
    harness.Worker(lambda which=which: serve(which)).finish()
expect(16, "4 threads of different modes, 4 shapes")


# 2. Instances of one class that differ in a number.
class Scale(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


scales = [Scale(k) for k in range(2, 14)]
for scale in scales:
    torch.compile(scale, backend=counting, dynamic=False)(torch.ones(3))
expect(12, "12 instances of a class")

# 3. Models that have nothing in common but that their class is torch's own.
models = [nn.Sequential(nn.Linear(4, 4 + k)) for k in range(12)]
for model in models:
    torch.compile(model, backend=counting, dynamic=False)(torch.ones(2, 4))
expect(12, "12 unrelated models")

# 4. What must stay: one user with too many shapes comes to an end.
g = torch.compile(lambda x: x.cos(), backend=counting, dynamic=False)
for n in range(2, 14):
    g(torch.ones(n))
expect(8, "one thread with 12 shapes, limit 8")
harness.verdict(faults)
