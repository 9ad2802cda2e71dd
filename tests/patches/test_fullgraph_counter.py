from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker

import torchcompat

eval_frame: Any = torch._dynamo.eval_frame
NAME = "set_fullgraph_compiled_frame_count"
pytestmark = pytest.mark.skipif(
    torchcompat.plan(["fullgraph_counter"])["fullgraph_counter"].state.value
    not in ("ok", "pending", "applied"),
    reason="this torch counts per thread, or not at all",
)
x = torch.randn(4)


def count(value: int) -> int:
    return int(getattr(eval_frame, NAME)(value))


class Held:
    """A thread that has begun a call with one counted frame, until it is let go."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> tuple[int, int]:
        begun = count(0)
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        return begun, count(-1)

    def end(self) -> tuple[int, int]:
        self.leave.set()
        found: tuple[int, int] = self.worker.get()
        return found


def test_a_call_in_company_is_not_judged(patched: None) -> None:
    first = Held()
    second = Held()
    assert first.end() == (-1, 1)
    assert second.end() == (-1, 1)
    third = Held()
    assert Held().end() == (-1, 1)  # began and ended inside the third one
    assert third.end() == (-1, 1)


def test_the_end_of_another_call_and_the_next_ones_beginning(patched: None) -> None:
    held = Held()

    def end_and_begin() -> tuple[int, int]:
        return count(-1), count(0)

    assert Worker(end_and_begin).get() == (-1, -1)
    assert held.end() == (-1, 1)


def test_a_lone_call_is_judged_as_ever(patched: None) -> None:
    assert (count(0), count(-1), count(-1)) == (-1, 0, -1)
    assert Held().end() == (-1, 0)


def test_a_nested_call_is_part_of_its_outermost_one(patched: None) -> None:
    function = torch.compile(lambda y: y.sin(), backend="eager", fullgraph=True)
    function(x)
    assert count(0) == -1
    function(x)
    assert count(-1) >= 0
    assert count(-1) == -1


def test_compiled_calls_of_many_threads_are_all_right(patched: None) -> None:
    functions = [
        torch.compile(f, backend="eager", fullgraph=True)
        for f in (lambda y: y.sin() + 1, lambda y: y.cos() - 1)
    ]
    wanted = [x.sin() + 1, x.cos() - 1]
    for function in functions:
        function(x)

    def loop(which: int) -> None:
        for _ in range(300):
            torch.testing.assert_close(functions[which](x), wanted[which])

    for worker in [Worker(lambda i=i: loop(i % 2)) for i in range(4)]:
        worker.get()


def test_it_is_the_c_function_again_afterwards() -> None:
    before = getattr(eval_frame, NAME)
    with torchcompat.applied():
        assert getattr(eval_frame, NAME) is not before
    assert getattr(eval_frame, NAME) is before
    assert before(-1) == -1
