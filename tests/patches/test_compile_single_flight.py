"""compile_single_flight: as many compiles as one thread would make.

The compile lock is held until every thread has missed the cache and stands before the lock: on
stock torch each of them then compiles.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import convert_frame

THREADS = 10
x = torch.ones(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


class Counting:
    """A backend that counts its compiles."""

    def __init__(self) -> None:
        self.compiles = 0

    def __call__(self, gm: torch.fx.GraphModule, _: Any) -> Any:
        self.compiles += 1
        return gm.forward


def at_the_lock(worker: Worker) -> bool:
    frame = sys._current_frames().get(worker.ident or 0)
    return frame is not None and frame.f_code.co_filename == convert_frame.__file__


@contextmanager
def compile_lock_held(workers: list[Worker]) -> Any:
    """Until the body's `workers` have all come to the lock; then they go one by one."""
    with convert_frame.compile_lock:
        yield
        end = time.monotonic() + WAIT_S
        while not all(at_the_lock(w) for w in workers):
            assert time.monotonic() < end
            time.sleep(0.01)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of `calls`, each in a thread of its own, which all miss the cache first."""
    workers: list[Worker] = []
    with compile_lock_held(workers):
        workers += [Worker(call) for call in calls]
    return [w.get() for w in workers]


def test_a_herd_compiles_once_and_leaves_room(patched: None) -> None:
    backend = Counting()
    f = torch.compile(lambda y: y.sin() + 1, backend=backend, dynamic=False)
    for got in together(*[lambda: f(x)] * THREADS):
        torch.testing.assert_close(got, x.sin() + 1)
    assert backend.compiles == 1
    for n in range(5, 12):  # with the first that makes eight, the limit
        f(torch.ones(n))
    assert backend.compiles == 8
    for n in range(4, 12):
        f(torch.ones(n))
    assert backend.compiles == 8


def test_every_specialisation_once(patched: None) -> None:
    backend = Counting()
    f = torch.compile(lambda y: y.cos(), backend=backend, dynamic=False)
    inputs = [torch.ones(n) for n in (2, 3, 4)]
    calls = [lambda y=y: f(y) for y in inputs * 4]
    for y, got in zip(inputs * 4, together(*calls), strict=False):
        torch.testing.assert_close(got, y.cos())
    assert backend.compiles == 3


def test_other_guards_mean_another_compile(patched: None) -> None:
    backend = Counting()
    f = torch.compile(lambda y: y.tan(), backend=backend)

    def without_grad() -> Any:
        with torch.no_grad():
            return f(x)

    together(lambda: f(x), without_grad, lambda: f(x), without_grad)
    assert backend.compiles == 2


def test_the_code_of_another_backend_is_not_taken(patched: None) -> None:
    def function(y: torch.Tensor) -> torch.Tensor:
        return y.exp()

    backends = [Counting(), Counting()]
    compiled = [torch.compile(function, backend=b) for b in backends]
    together(*[lambda f=f: f(x) for f in compiled * 2])
    assert [b.compiles for b in backends] == [1, 1]


def test_every_part_of_a_broken_graph_once(patched: None) -> None:
    backend = Counting()
    meeting = threading.Barrier(3)

    @torch._dynamo.disable
    def meet() -> None:
        meeting.wait(WAIT_S)

    def function(y: torch.Tensor) -> torch.Tensor:
        z = y.sin()
        meet()
        return z * 2

    f = torch.compile(function, backend=backend)
    for got in together(*[lambda: f(x)] * 3):
        torch.testing.assert_close(got, x.sin() * 2)
    assert backend.compiles == 2


def test_training_through_the_same_code(patched: None) -> None:
    f = torch.compile(lambda y: (y.sin() * y).sum(), backend="aot_eager")

    def step() -> torch.Tensor:
        y = torch.ones(4, requires_grad=True)
        f(y).backward()
        assert y.grad is not None
        return y.grad

    for got in together(*[step] * 4):
        torch.testing.assert_close(got, x.cos() + x.sin())


def test_after_a_failed_compile_the_next_thread_compiles(patched: None) -> None:
    counting = Counting()

    def fails_first(gm: torch.fx.GraphModule, example: Any) -> Any:
        run = counting(gm, example)
        if counting.compiles == 1:
            raise ZeroDivisionError("the first compile")
        return run

    f = torch.compile(lambda y: y.sinh(), backend=fails_first)

    def call() -> str:
        try:
            f(x)
        except Exception as e:
            return "failed" if "the first compile" in str(e) else f"{e}"
        return "right"

    assert sorted(together(call, call, call)) == ["failed", "right", "right"]
    assert counting.compiles == 2


def test_the_answer_not_to_compile_holds_for_all(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    stock = convert_frame.has_tensor_in_frame
    monkeypatch.setattr(
        convert_frame, "has_tensor_in_frame", lambda frame: asked.append(1) or stock(frame)
    )
    f = torch.compile(lambda n: n + 1, backend="eager")
    assert together(*[lambda: f(3)] * 4) == [4] * 4
    assert len(asked) == 1


def test_skipping_guards_after_a_herd(patched: None) -> None:
    f = torch.compile(lambda y: y.cosh(), backend="eager", dynamic=False)
    together(*[lambda: f(x)] * 3)
    f(torch.ones(5))
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        torch.testing.assert_close(f(x), x.cosh())
    torch.testing.assert_close(f(torch.ones(5)), torch.ones(5).cosh())
