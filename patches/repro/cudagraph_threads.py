"""Threads call one function compiled with CUDA graphs, warmed up in the main thread."""

from __future__ import annotations

from typing import Any

import harness
import torch

faults: list[str] = []
harness.apply_patches("cudagraph_threads")


if not torch.cuda.is_available():
    harness.not_applicable("no CUDA device")
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
