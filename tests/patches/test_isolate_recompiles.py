from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker

import torchcompat

eval_frame: Any = torch._dynamo.eval_frame
NAME = "set_eval_frame_isolate_recompiles_id"
pytestmark = pytest.mark.skipif(
    torchcompat.plan(["isolate_recompiles"])["isolate_recompiles"].state.value
    not in ("ok", "pending", "applied"),
    reason="this torch keeps the region per thread, or has none",
)


def set_id(value: int) -> Any:
    return getattr(eval_frame, NAME)(value)


def in_c() -> int:
    return int(eval_frame.get_eval_frame_isolate_recompiles_id())


class Call:
    """A thread in a compiled call of one region, until it is let go."""

    def __init__(self, region: int) -> None:
        self.region = region
        self.inside, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> None:
        prior = set_id(self.region)
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        set_id(prior)

    def end(self) -> None:
        self.leave.set()
        self.worker.get()


@pytest.fixture
def quiet(patched: None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_region_that_is_alone_has_its_id(quiet: None) -> None:
    call = Call(7)
    assert in_c() == 7
    call.end()
    assert in_c() == -1


@pytest.mark.parametrize("other", [-1, 8])
def test_with_company_there_is_no_region(quiet: None, other: int) -> None:
    first = Call(7)
    second = Call(other)
    assert in_c() == -1
    second.end()
    assert in_c() == 7
    third = Call(other)
    first.end()
    assert in_c() == other
    third.end()
    assert in_c() == -1


def test_threads_in_one_region_share_it(quiet: None) -> None:
    first, second = Call(7), Call(7)
    assert in_c() == 7
    first.end()
    assert in_c() == 7
    second.end()
    assert in_c() == -1


def test_nested_calls(quiet: None) -> None:
    outer = set_id(7)
    inner = set_id(8)
    assert (outer, inner, in_c()) == (-1, 7, 8)
    set_id(inner)
    assert in_c() == 7
    plain = set_id(-1)
    assert in_c() == -1
    set_id(plain)
    set_id(outer)
    assert in_c() == -1


def test_a_thread_that_ended_inside_is_no_company(quiet: None) -> None:
    Worker(lambda: set_id(-1)).get()
    call = Call(7)
    assert in_c() == 7
    call.end()


def test_it_says_so_once(patched: None) -> None:
    company = Call(-1)
    with pytest.warns(UserWarning, match="isolate_recompiles=True has no effect") as found:
        set_id(set_id(7))
        set_id(set_id(7))
    assert len(found) == 1
    company.end()


def test_calls_of_the_plain_kind_never_warn(patched: None) -> None:
    function = torch.compile(lambda y: y.sin(), backend="eager")
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for worker in [Worker(lambda: function(x)) for _ in range(4)]:
            torch.testing.assert_close(worker.get(), x.sin())


def test_isolated_calls_of_many_threads_are_right(quiet: None) -> None:
    def double(y: Any) -> Any:
        return y * 2

    functions = [
        torch.compile(double, backend="eager", isolate_recompiles=isolated, dynamic=False)
        for isolated in (True, True, False)
    ]

    def work(i: int) -> None:
        for n in range(1, 12):
            torch.testing.assert_close(functions[i % 3](torch.ones(n)), torch.full((n,), 2.0))

    for worker in [Worker(lambda i=i: work(i)) for i in range(6)]:
        worker.get()
    assert in_c() == -1


def test_a_call_that_began_before_the_patch_leaves_nothing_behind() -> None:
    inside, leave = threading.Event(), threading.Event()

    @torch.compiler.disable
    def stand_still() -> None:
        inside.set()
        assert leave.wait(WAIT_S)

    def body(y: Any) -> Any:
        stand_still()
        return y.sin()

    ended, stay = threading.Event(), threading.Event()
    function = torch.compile(body, backend="eager")

    def call() -> None:
        function(torch.ones(3))
        ended.set()
        assert stay.wait(WAIT_S)

    worker = Worker(call)
    assert inside.wait(WAIT_S)
    with torchcompat.applied(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        leave.set()
        assert ended.wait(WAIT_S)
        prior = set_id(7)  # the other thread is alive, and in no call
        assert in_c() == 7
        set_id(prior)
        stay.set()
        worker.get()
    assert in_c() == -1


def test_it_is_the_c_function_again_afterwards() -> None:
    before = getattr(eval_frame, NAME)
    with torchcompat.applied():
        assert getattr(eval_frame, NAME) is not before
    assert getattr(eval_frame, NAME) is before
    assert before(-1) == -1
