from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from interleaving import WAIT_S, Worker
from torch._dynamo.backends.common import aot_autograd

from torchcompat.patches import global_state

x = torch.randn(4)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


class Compile:
    """A compile in another thread that stands in its backend until it is let go."""

    def __init__(self, draws: bool = False) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.compiles = 0
        self.worker = Worker(lambda: self.call(draws))
        assert self.inside.wait(WAIT_S)

    def call(self, draws: bool) -> Any:
        function = torch.compile(lambda y: y.sin() + 1, backend=self.backend)
        return function(x), function(x)

    def backend(self, graph: Any, _: Any) -> Any:
        self.compiles += 1
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        return graph.forward

    def end(self) -> None:
        self.leave.set()
        for result in self.worker.get():
            torch.testing.assert_close(result, x.sin() + 1, check_dtype=False)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(3).tolist(), lambda: torch.randperm(50).tolist(), random.random],
)
def test_random_numbers_are_not_handed_out_twice(patched: None, draw: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    wanted = [draw(), draw(), draw()]
    torch.manual_seed(0)
    random.seed(0)
    compiling = Compile()
    found = [draw(), draw()]
    compiling.end()
    assert [*found, draw()] == wanted


def test_settings_of_other_threads_stay_and_the_compile_is_made_for_them(patched: None) -> None:
    compiling = Compile()
    torch.use_deterministic_algorithms(True, warn_only=True)
    compiling.end()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert compiling.compiles == 2
    compiling = Compile()
    torch.set_default_dtype(torch.float64)
    compiling.end()
    assert torch.get_default_dtype() == torch.float64


def test_what_the_compile_itself_does_is_put_back(patched: None) -> None:
    def backend(graph: Any, _: Any) -> Any:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        return graph.forward

    def call() -> Any:
        return torch.compile(lambda y: y.cos(), backend=backend)(x)

    torch.testing.assert_close(Worker(call).get(), x.cos())
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_a_failing_compile_fails_with_its_own_error(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        inside.set()
        assert leave.wait(WAIT_S)
        raise ZeroDivisionError("the backend's own")

    worker = Worker(lambda: torch.compile(lambda y: y.tan(), backend=backend)(x))
    assert inside.wait(WAIT_S)
    torch.use_deterministic_algorithms(True)
    leave.set()
    with pytest.raises(Exception, match="the backend's own"):
        worker.get()
    assert torch.are_deterministic_algorithms_enabled()


def test_the_setters_are_compiled_and_called_as_ever(patched: None) -> None:
    torch.set_default_dtype(torch.float64)
    assert torch.ones(1).dtype == torch.float64
    with pytest.raises(TypeError):
        torch.set_default_dtype(torch.int32)
    compiled = torch.compile(lambda y: y + torch.ones(1), backend="eager")
    assert compiled(torch.ones(1)).dtype == torch.float64


def test_alone_the_generator_is_put_back_as_torch_does(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def backend(graph: Any, _: Any) -> Any:
        torch.rand(5)
        return graph.forward

    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    torch.compile(lambda y: y.exp(), backend=backend)(x)
    assert torch.equal(torch.rand(2), wanted)


def test_a_state_of_ones_own_is_put_back_as_ever(patched: None) -> None:
    state = random.getstate()
    torch.compile(lambda y: y.log(), backend="eager")(x)
    wanted = random.random()
    random.setstate(state)
    assert random.random() == wanted
    random.setstate(state)
    assert random.random() == wanted


def test_autograd_compiles_hand_out_no_random_numbers_twice(patched: None) -> None:
    class WithBackward(Compile):
        def call(self, draws: bool) -> Any:
            backend = aot_autograd(fw_compiler=self.boxed)
            function = torch.compile(lambda y: y.sin() + 1, backend=backend)
            return function(x), function(x)

        def boxed(self, graph: Any, inputs: Any) -> Any:
            return make_boxed_func(self.backend(graph, inputs))

    torch.manual_seed(0)
    wanted = [torch.rand(3).tolist() for _ in range(2)]
    torch.manual_seed(0)
    compiling = WithBackward()
    found = [torch.rand(3).tolist()]
    compiling.end()
    assert [*found, torch.rand(3).tolist()] == wanted


@pytest.mark.skipif(
    "guard_filter_fn" not in inspect.getsource(torch._dynamo.guards),
    reason="nothing of the program runs while guards are made",
)
def test_a_setting_assigned_while_guards_are_made_begins_the_compile_anew(patched: None) -> None:
    assigned: list[torch.dtype] = []

    def assign_elsewhere(guards: Any) -> list[bool]:
        if not assigned:
            assigned.append(torch.float64)
            Worker(lambda: torch.set_default_dtype(torch.float64)).get()
        return [True for _ in guards]

    options = {"guard_filter_fn": assign_elsewhere}
    compiled = torch.compile(lambda y: y + 1, backend="eager", options=options)
    before = torch.get_default_dtype()
    try:
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0).float())
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert assigned


def test_what_a_compile_puts_back_does_not_hide_who_has_assigned_before(patched: None) -> None:
    state = global_state._state
    entered = state.begin()
    Worker(lambda: torch.set_default_dtype(torch.float64)).get()
    state.dtype(state.begin(), torch.float64)
    assert state.moved(entered)
    own = state.begin()
    torch.set_default_dtype(torch.float32)
    assert not state.moved(own)
