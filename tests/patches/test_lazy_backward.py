"""lazy_backward: one compile for the first backward of a graph, whoever else runs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

Compiler = Callable[[torch.fx.GraphModule, Any], Any]


def as_is(gm: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(gm.forward)


def compiled_with(backward: Compiler, function: Callable[..., Any]) -> Callable[..., Any]:
    backend = aot_autograd(fw_compiler=as_is, bw_compiler=backward)
    return torch.compile(function, backend=backend)


class Meeting:
    """A backward compiler in which two threads meet, if two come within a second."""

    def __init__(self) -> None:
        self.calls = 0
        self.barrier = threading.Barrier(2)

    def __call__(self, gm: torch.fx.GraphModule, example: Any) -> Any:
        self.calls += 1
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(1)
        return as_is(gm, example)


def test_two_first_backwards_compile_once(patched: None) -> None:
    meeting = Meeting()
    f = compiled_with(meeting, lambda x: x.sin() * x)
    xs = [torch.randn(4, requires_grad=True) for _ in range(3)]
    losses = [f(x).sum() for x in xs]
    for worker in [Worker(loss.backward) for loss in losses]:
        worker.get()
    assert meeting.calls == 1
    for x in xs:
        torch.testing.assert_close(x.grad, (x.cos() * x + x.sin()).detach())


def test_who_waited_for_a_failed_compile_compiles_itself(patched: None) -> None:
    began, arrived = threading.Event(), threading.Event()
    outcomes: list[str] = []

    def fails_once(gm: torch.fx.GraphModule, example: Any) -> Any:
        outcomes.append("began")
        if len(outcomes) == 1:
            began.set()
            assert arrived.wait(WAIT_S)
            raise ZeroDivisionError("the first compile")
        return as_is(gm, example)

    f = compiled_with(fails_once, lambda x: x.cos() * x)
    a, b = (torch.randn(4, requires_grad=True) for _ in range(2))
    first, second = f(a).sum(), f(b).sum()
    loser = Worker(first.backward)
    assert began.wait(WAIT_S)
    winner = Worker(lambda: (arrived.set(), second.backward()))
    with pytest.raises(ZeroDivisionError, match="the first compile"):
        loser.get()
    winner.get()
    torch.testing.assert_close(b.grad, (b.cos() - b.sin() * b).detach())
    assert len(outcomes) == 2


def test_backwards_of_different_graphs_do_not_wait_for_each_other(patched: None) -> None:
    inside, other_done = threading.Event(), threading.Event()

    def patient(gm: torch.fx.GraphModule, example: Any) -> Any:
        inside.set()
        assert other_done.wait(WAIT_S)
        return as_is(gm, example)

    slow = compiled_with(patient, lambda x: x.exp() * x)
    quick = compiled_with(as_is, lambda x: x.tan() * x)
    x, y = (torch.randn(4, requires_grad=True) for _ in range(2))
    a, b = slow(x).sum(), quick(y).sum()
    held = Worker(a.backward)
    assert inside.wait(WAIT_S)
    Worker(b.backward).get()
    other_done.set()
    held.get()


def test_a_backward_inside_a_compile_does_not_wait(patched: None) -> None:
    """It has the compile lock, which the compile that it would wait for may need."""
    inside, leave = threading.Event(), threading.Event()
    calls: list[str] = []

    def held_up(gm: torch.fx.GraphModule, example: Any) -> Any:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            inside.set()
            assert leave.wait(WAIT_S)
        return as_is(gm, example)

    f = compiled_with(held_up, lambda x: x.sinh() * x)
    xs = [torch.randn(4, requires_grad=True) for _ in range(2)]
    first, second = (f(x).sum() for x in xs)
    slow = Worker(first.backward)
    assert inside.wait(WAIT_S)
    compile_lock = torch._dynamo.convert_frame.compile_lock

    def backward_under_the_lock() -> None:
        with compile_lock:
            second.backward()

    Worker(backward_under_the_lock).get()
    leave.set()
    slow.get()
    assert len(calls) == 2
