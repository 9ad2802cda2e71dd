"""Threads call one function compiled with CUDA graphs, and train one of their own each."""

from __future__ import annotations

from typing import Any

import harness
import torch

faults: list[str] = []
harness.apply_patches("cudagraph_threads")


def state() -> Any:
    """What the first call of a thread asks for; needs no GPU."""
    trees: Any = __import__("torch._inductor.cudagraph_trees", fromlist=["get_obj"])
    return trees.get_obj(trees.local, "tree_manager_containers")


state()
worker = harness.Worker(state).finish()
if worker.error is not None:
    faults.append(f"another thread's first call raised {harness.first_line(worker.error)}")

if torch.cuda.is_available():
    begin_step: Any = torch.compiler.cudagraph_mark_step_begin
    x = torch.randn(64, 64, device="cuda")
    wanted = (x @ x).relu().sum(0)
    function = torch.compile(lambda y: (y @ y).relu().sum(0), mode="reduce-overhead")
    for _ in range(3):
        function(x)

    def call() -> None:
        for _ in range(5):
            begin_step()
            torch.testing.assert_close(function(x).clone(), wanted, rtol=1e-3, atol=1e-3)

    for worker in [harness.Worker(call) for _ in range(3)]:
        if worker.finish().error is not None:
            faults.append(f"a call of a thread: {harness.first_line(worker.error)[:80]}")
harness.verdict(faults)
