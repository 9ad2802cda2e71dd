"""A checkpointed dropout; another thread draws during its forward, and during its recomputation."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch.utils.checkpoint import checkpoint

harness.apply_patches("checkpoint_rng")
faults: list[str] = []


def others_draw() -> None:
    harness.Worker(lambda: torch.rand(7)).finish()


def masks_differ(reentrant: bool, draws_in: int) -> bool:
    """Whether the masks of forward (run 0) and recomputation (run 1) differ, where another thread
    draws in run `draws_in`."""
    masks: list[Any] = []

    def body(x: Any) -> Any:
        if len(masks) == draws_in:
            others_draw()
        masks.append((torch.rand(64) > 0.5).float())
        return (x * masks[-1]).sin()

    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    checkpoint(body, x, use_reentrant=reentrant).sum().backward()
    return not torch.equal(masks[0], masks[1])


for reentrant in (False, True):
    for run, when in enumerate(("forward", "recomputation")):
        if masks_differ(reentrant, run):
            faults.append(f"use_reentrant={reentrant}: other mask after a draw in the {when}")

# What must stay: the numbers of a program that only one thread draws in.
torch.manual_seed(0)
wanted = torch.rand(3), torch.rand(3)
torch.manual_seed(0)
x = torch.ones(3, requires_grad=True)
checkpoint(lambda y: y * torch.rand(3), x, use_reentrant=False).sum().backward()
assert x.grad is not None
if not torch.equal(x.grad, wanted[0]) or not torch.equal(torch.rand(3), wanted[1]):
    faults.append("other numbers than without threads")
harness.verdict(faults)
