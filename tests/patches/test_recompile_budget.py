"""recompile_budget: who shares the limit of a code object, and who does not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from interleaving import WAIT_S, Worker
from torch import nn
from torch.utils.checkpoint import checkpoint

LIMIT = 8
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

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=self, dynamic=False)


class Scale(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.factor


def test_modes_have_budgets_of_their_own(patched: None) -> None:
    backend = Counting()
    f = backend.compiled(lambda y: y.sin())
    for grad in (True, False):
        for autocast in (True, False):
            with (
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16),
            ):
                for n in range(2, 7):
                    f(torch.ones(n))
    assert backend.compiles == 20


def test_live_threads_do_not_use_up_each_others_budget(patched: None) -> None:
    backend = Counting()
    f = backend.compiled(lambda y: y.cos())
    done = threading.Event()
    turns = [threading.Event() for _ in range(3)]

    def serve(which: int) -> None:
        for n in range(5):
            f(torch.ones(10 * which + n + 2))
        turns[which].set()
        assert done.wait(WAIT_S)

    workers = []
    for which, turn in enumerate(turns):  # one after the other, all alive to the end
        workers.append(Worker(lambda which=which: serve(which)))
        assert turn.wait(WAIT_S)
    done.set()
    for worker in workers:
        worker.get()
    assert backend.compiles == 15


def test_threads_that_have_ended_count(patched: None) -> None:
    backend = Counting()
    f = backend.compiled(lambda y: y.tan())
    for n in range(2, 14):  # a thread per request must not be a way around the limit
        Worker(lambda n=n: f(torch.ones(n))).get()
    assert backend.compiles == LIMIT


def test_one_thread_comes_to_the_limit_as_ever(patched: None) -> None:
    backend = Counting()
    f = backend.compiled(lambda y: y.exp())
    for n in range(2, 14):
        torch.testing.assert_close(f(torch.ones(n)), torch.ones(n).exp())
    assert backend.compiles == LIMIT


def test_the_limit_over_all_stays(patched: None) -> None:
    backend = Counting()
    scales = [Scale(k) for k in range(2, 14)]
    # 2.12 and later keep configuration per thread, so this is the thread that compiles.
    with torch._dynamo.config.patch(accumulated_recompile_limit=LIMIT + 2):
        for scale in scales:
            backend.compiled(scale)(x)
    assert backend.compiles == LIMIT + 2


def test_instances_have_budgets_of_their_own(patched: None) -> None:
    backend = Counting()
    scales = [Scale(k) for k in range(2, 14)]
    for scale in scales:
        torch.testing.assert_close(backend.compiled(scale)(x), x * scale.factor)
    assert backend.compiles == 12


def test_modules_of_torch_do_not_share_code(patched: None) -> None:
    backend = Counting()
    models = [nn.Sequential(nn.Linear(4, 4 + k)) for k in range(12)]
    for model in models:
        torch.testing.assert_close(backend.compiled(model)(x), model(x))
    assert backend.compiles == 12


def test_compiling_one_module_again_finds_its_code(patched: None) -> None:
    backend = Counting()
    model = nn.Sequential(nn.Linear(4, 4))
    for _ in range(3):
        backend.compiled(model)(x)
    assert backend.compiles == 1


def test_a_builtin_can_be_compiled(patched: None) -> None:
    backend = Counting()
    for _ in range(2):
        torch.testing.assert_close(backend.compiled(torch.sin)(x), x.sin())
    assert backend.compiles == 1


def test_the_code_of_a_dead_module_is_let_go(patched: None) -> None:
    wrap_inline = torch._dynamo.external_utils.wrap_inline
    model = nn.Linear(4, 4)
    first = wrap_inline(model).__code__
    assert wrap_inline(model).__code__ is first
    del model
    gc.collect()
    assert wrap_inline(nn.Linear(4, 4)).__code__ is not first


def test_thread_counts_do_not_turn_a_recomputation_eager(patched: None) -> None:
    """Forward and backward on threads with counts of their own, as servers and autograd have them:
    each count is a recompile, and right, but none may use up what the others need."""
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(torch.get_num_threads())
            return graph.forward(*args)

        return run

    function = torch.compile(lambda y: y.sin() * 2, backend=backend, dynamic=False)
    counts = range(1, 2 * LIMIT + 1)
    before = torch.get_num_threads()

    def forward(count: int) -> Any:
        torch.set_num_threads(count)
        return checkpoint(function, torch.ones(4, requires_grad=True), use_reentrant=False)

    def backward(count: int, y: Any) -> None:
        torch.set_num_threads(count)
        y.sum().backward()

    try:
        for count in counts:
            y = Worker(lambda count=count: forward(count)).get()
            Worker(lambda count=count, y=y: backward(count + len(counts), y)).get()
    finally:
        torch.set_num_threads(before)
    wanted = [n for count in counts for n in (count, count + len(counts))]
    assert runs == wanted  # an eager run would not be among them
