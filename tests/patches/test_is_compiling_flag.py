from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import compiler, nn

x = torch.randn(4)


class Slow(nn.Module):
    """Notes what it is told while it is traced, and stands still there."""

    def __init__(self, inside: threading.Event, leave: threading.Event, told: list[bool]) -> None:
        super().__init__()
        # In a closure: export puts a module's own attributes back as they were.
        self.note = lambda: told.append(compiler.is_compiling())
        self.inside, self.leave = inside, leave

    def forward(self, y: Any) -> Any:
        self.note()
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        self.note()
        return y.sin()


def test_an_export_is_not_seen_by_other_threads(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()
    told: list[bool] = []
    model = Slow(inside, leave, told)
    worker = Worker(lambda: torch.export.export(model, (x,), strict=False))
    assert inside.wait(WAIT_S)
    assert not compiler.is_compiling()
    assert Worker(compiler.is_compiling).get() is False
    if hasattr(compiler, "is_exporting"):
        assert not compiler.is_exporting()
    leave.set()
    worker.get()
    assert told
    assert all(told)


def test_writers_that_overlap_leave_nothing_behind(patched: None) -> None:
    """Save, set, restore from outside the module, as an export does."""

    def export(inside: threading.Event, leave: threading.Event) -> bool:
        before = compiler._is_compiling_flag
        compiler._is_compiling_flag = True
        inside.set()
        assert leave.wait(WAIT_S)
        told = compiler.is_compiling()
        compiler._is_compiling_flag = before
        return told

    events = [threading.Event() for _ in range(4)]
    first = Worker(lambda: export(*events[:2]))
    assert events[0].wait(WAIT_S)
    second = Worker(lambda: export(*events[2:]))
    assert events[2].wait(WAIT_S)
    events[1].set()
    assert first.get() is True
    events[3].set()
    assert second.get() is True
    assert not compiler.is_compiling()
    assert Worker(compiler.is_compiling).get() is False


def test_a_compile_is_seen_by_its_own_thread_alone(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()
    own: list[bool] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        own.append(compiler.is_compiling())
        inside.set()
        assert leave.wait(WAIT_S)
        return graph.forward

    worker = Worker(lambda: torch.compile(lambda y: y + 1, backend=backend)(x))
    assert inside.wait(WAIT_S)
    assert not compiler.is_compiling()
    leave.set()
    torch.testing.assert_close(worker.get(), x + 1)
    # From 2.13 on a compile says so to its own thread; that stays.
    assert own == [hasattr(compiler, "_compile_session_context")]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_traced_code_is_told_that_it_is_compiled(patched: None, fullgraph: bool) -> None:
    def function(y: Any) -> Any:
        return y + 1 if compiler.is_compiling() else y - 1

    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    torch.testing.assert_close(compiled(x), x + 1)
    torch.testing.assert_close(function(x), x - 1)
