from __future__ import annotations

import threading
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch
from interleaving import WAIT_S, Worker

x = torch.randn(4)


class Mode(dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Inside:
    """A thread that stands inside a mode until it is let go."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self.run)
        assert self.entered.wait(WAIT_S)

    def run(self) -> bool:
        with Mode():
            self.entered.set()
            assert self.leave.wait(WAIT_S)
            return bool(dispatch.is_in_torch_dispatch_mode())

    def end(self) -> bool:
        self.leave.set()
        return bool(self.worker.get())


def test_a_mode_elsewhere_is_not_active_here_and_code_compiles(patched: None) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inside = Inside()
    assert not dispatch.is_in_torch_dispatch_mode()
    assert not dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
    torch.compile(lambda y: y.sin(), backend=backend)(x)
    assert inside.end()
    assert len(graphs) == 1


def test_modes_that_overlap_leave_nothing_behind(patched: None) -> None:
    first = Inside()
    second = Inside()
    assert first.end()
    assert second.end()
    assert dispatch._is_in_torch_dispatch_mode is False
    assert dispatch._is_in_non_infra_torch_dispatch_mode is False


def test_nested_modes_of_one_thread_count_as_ever(patched: None) -> None:
    with Mode():
        with Mode():
            assert dispatch.is_in_torch_dispatch_mode()
        assert dispatch.is_in_torch_dispatch_mode()
    assert not dispatch.is_in_torch_dispatch_mode()
