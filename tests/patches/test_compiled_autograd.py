"""Compiled autograd leaves marks of its trace in the thread, so that all runs in threads here."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import compiled_autograd

enable: Any = compiled_autograd


def compiler(graph: Any) -> Any:
    return torch.compile(graph, backend="eager")


def gradient() -> float:
    y = torch.tensor(3.0, requires_grad=True)
    (y * y).backward()
    assert y.grad is not None
    return float(y.grad)


class Inside:
    """A thread that stands inside a context until it is let go."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self.run)
        assert self.entered.wait(WAIT_S)

    def run(self) -> float:
        with enable._enable(compiler):
            self.entered.set()
            assert self.leave.wait(WAIT_S)
            return gradient()

    @staticmethod
    def alone() -> float:
        with enable._enable(compiler):
            return gradient()


def test_contexts_of_threads_take_turns(patched: None) -> None:
    inside = Inside()

    waiting = Worker(Inside.alone)
    waiting.join(0.2)
    assert waiting.is_alive()
    inside.leave.set()
    assert inside.worker.get() == waiting.get() == 6
    assert not compiled_autograd.compiled_autograd_enabled


def test_a_context_inside_a_context_of_the_same_thread(patched: None) -> None:
    def nested() -> float:
        with enable._enable(compiler), enable._enable(compiler):
            return gradient()

    assert Worker(nested).get() == 6
    assert compiled_autograd.depth == 0


def test_a_context_that_waits_too_long_raises(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchcompat.patches.compiled_autograd._WAIT_S", 0.1)
    inside = Inside()
    with pytest.raises(RuntimeError, match="one thread at a time"), enable._enable(compiler):
        pass
    inside.leave.set()
    inside.worker.get()
    assert Worker(Inside.alone).get() == 6  # the failure has not kept the lock
