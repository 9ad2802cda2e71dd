"""Threads with one size each call one function, one after the other."""

from __future__ import annotations

import harness
import torch

harness.warm_up()
harness.apply_patches("pgo_threads")
faults = []
dynamic: list[bool] = []


def backend(gm: torch.fx.GraphModule, inputs: list[object]) -> object:
    dynamic.append(
        any(
            not isinstance(size, int)
            for value in inputs
            for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        )
        or any(not isinstance(value, torch.Tensor) for value in inputs)
    )
    return gm.forward


function = torch.compile(lambda y: y.sin(), backend=backend)
for size in (8, 16, 24):
    harness.Worker(lambda: function(torch.randn(size))).finish()  # noqa: B023 - ends in its turn
if dynamic != [False] * 3:
    faults.append(f"threads with one size each; graphs dynamic: {dynamic}")

# What must stay: sizes that vary in one thread are dynamic.
dynamic.clear()
varied = torch.compile(lambda y: y.cos(), backend=backend)


def vary() -> None:
    for size in (8, 16, 24):
        varied(torch.randn(size))


harness.Worker(vary).finish()
if dynamic != [False, True]:
    faults.append(f"sizes vary in one thread; graphs dynamic: {dynamic}")
harness.verdict(faults)
