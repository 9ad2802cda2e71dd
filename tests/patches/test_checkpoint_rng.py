from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch.utils.checkpoint import checkpoint

import torchcompat

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])
x = torch.ones(64)


@contextmanager
def idle_thread() -> Iterator[None]:
    """Another thread is alive, and draws nothing."""
    leave = threading.Event()
    worker = Worker(lambda: leave.wait(WAIT_S))
    try:
        yield
    finally:
        leave.set()
        worker.get()


class Runs:
    """A function that keeps what it drew in each run, and has another thread draw in between."""

    def __init__(self, draw: Callable[[], Any] = lambda: torch.rand(64), calls: int = 3) -> None:
        self.draw, self.calls = draw, calls
        self.drawn: list[list[Any]] = []
        self.others: list[Any] = []

    def __call__(self, y: Any) -> Any:
        drawn: list[Any] = []
        self.drawn.append(drawn)
        for i in range(self.calls):
            if i == len(self.drawn) % self.calls:
                self.others.append(Worker(lambda: torch.rand(5)).get())
            drawn.append(self.draw())
        return (y * 2).sin()

    def assert_alike(self) -> None:
        assert len(self.drawn) > 1
        for run in self.drawn[1:]:
            torch.testing.assert_close(run, self.drawn[0], rtol=0, atol=0)


def leaf() -> Any:
    return x.clone().requires_grad_()


def state() -> Any:
    return torch.random.get_rng_state()


@REENTRANT
@pytest.mark.parametrize("company", [False, True])
def test_draws_are_repeated(patched: None, reentrant: bool, company: bool) -> None:
    runs = Runs()
    for _ in range(3):
        runs.drawn.clear()
        if company:
            with idle_thread():
                checkpoint(runs, leaf(), use_reentrant=reentrant).sum().backward()
        else:
            checkpoint(runs, leaf(), use_reentrant=reentrant).sum().backward()
        runs.assert_alike()


@REENTRANT
def test_what_others_draw_is_not_drawn_again(patched: None, reentrant: bool) -> None:
    runs = Runs()
    with idle_thread():
        y = checkpoint(runs, leaf(), use_reentrant=reentrant)
        before = state()
        y.sum().backward()
        after = state()
    assert not torch.equal(before, after)
    torch.random.set_rng_state(before)
    assert torch.equal(torch.rand(5), runs.others[-1])
    assert torch.equal(state(), after)


@REENTRANT
@pytest.mark.parametrize("company", [False, True])
def test_the_numbers_are_those_of_stock_torch(reentrant: bool, company: bool) -> None:
    def train() -> tuple[Any, ...]:
        torch.manual_seed(3)
        y = leaf()
        drop = torch.nn.functional.dropout
        z = checkpoint(lambda v: drop(drop(v.sin()) * 2), y, use_reentrant=reentrant)
        (z * torch.rand(64)).sum().backward()
        return z.detach(), y.grad, torch.rand(3), state()

    wanted = train()
    with torchcompat.applied():
        if company:
            with idle_thread():
                found = train()
        else:
            found = train()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


DRAWS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: torch.nn.functional.dropout(x),
    "native_dropout": lambda: torch.native_dropout(x, 0.5, True)[0],
    "randn": lambda: torch.randn(9),
    "randint": lambda: torch.randint(0, 99, (9,)),
    "randperm": lambda: torch.randperm(40),
    "bernoulli": lambda: torch.bernoulli(x / 2),
    "normal": lambda: torch.normal(0.0, x),
    "multinomial": lambda: torch.multinomial(x, 5),
    "poisson": lambda: torch.poisson(x * 9),
    "exponential_": lambda: torch.empty(9).exponential_(),
    "rrelu": lambda: torch.nn.functional.rrelu(-x, training=True),
    "gamma": lambda: torch.distributions.Gamma(x, 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(x).sample(),
    "default": lambda: torch.rand(9, generator=torch.default_generator),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(
        *[torch.ones(1, 1, 8, 8)] * 3, dropout_p=0.5
    ),
    "vmap": lambda: torch.vmap(torch.nn.functional.dropout, randomness="different")(
        torch.ones(3, 9)
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw(patched: None, name: str) -> None:
    checkpoint(lambda v: v.sin(), leaf(), use_reentrant=False)
    DRAWS[name]()  # outside of all regions
    runs = Runs(DRAWS[name])
    with idle_thread():
        checkpoint(runs, leaf(), use_reentrant=False).sum().backward()
    runs.assert_alike()


@REENTRANT
def test_a_region_within_a_region(patched: None, reentrant: bool) -> None:
    inner, outer = Runs(), Runs()

    def body(y: Any) -> Any:
        return checkpoint(inner, outer(y), use_reentrant=reentrant).cos()

    with idle_thread():
        checkpoint(body, leaf(), use_reentrant=reentrant).sum().backward()
    inner.assert_alike()
    outer.assert_alike()
    assert len(inner.drawn) == 3


def seeded() -> Any:
    torch.manual_seed(7)
    return torch.rand(9)


def forked() -> Any:
    with torch.random.fork_rng(devices=[]):
        a = torch.rand(9)
    return torch.stack([a, torch.rand(9)])


def put_back() -> Any:
    before = torch.get_rng_state()
    a = torch.rand(9)
    torch.set_rng_state(before)
    return torch.stack([a, torch.rand(9)])


@REENTRANT
@pytest.mark.parametrize("draw", [seeded, forked, put_back])
def test_a_region_that_seeds_or_puts_back(
    patched: None, reentrant: bool, draw: Callable[[], Any]
) -> None:
    runs = Runs(draw)
    with idle_thread():
        y = checkpoint(runs, leaf(), use_reentrant=reentrant)
        torch.manual_seed(11)
        y.sum().backward()
        after = torch.rand(3)
    runs.assert_alike()
    torch.manual_seed(11)
    torch.rand(5)  # by the other thread, during the recomputation
    assert torch.equal(after, torch.rand(3))


def test_early_stop_leaves_nothing_behind(patched: None) -> None:
    ends: list[int] = []

    def body(y: Any) -> Any:
        z = (y * torch.rand(64)).sin()
        ends.append(1)
        return z + 1

    with idle_thread():
        checkpoint(body, leaf(), use_reentrant=False).sum().backward()
        assert len(ends) == 1  # the recomputation stopped before
        torch.manual_seed(5)
        found = torch.rand(3)
        torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))


def test_a_failing_forward_leaves_nothing_behind(patched: None) -> None:
    def body(y: Any) -> Any:
        torch.rand(3)
        raise KeyError("mine")

    for reentrant in (False, True):
        with pytest.raises(KeyError, match="mine"):
            checkpoint(body, leaf(), use_reentrant=reentrant)
    runs = Runs()
    checkpoint(runs, leaf(), use_reentrant=False).sum().backward()
    runs.assert_alike()


def test_generators_of_ones_own_are_left_alone(patched: None) -> None:
    generator = torch.Generator().manual_seed(1)
    runs = Runs(lambda: torch.rand(9, generator=generator), calls=1)
    with idle_thread():
        checkpoint(runs, leaf(), use_reentrant=False).sum().backward()
    assert not torch.equal(runs.drawn[0][0], runs.drawn[1][0])


@REENTRANT
def test_without_preserve_rng_state_nothing_is_repeated(patched: None, reentrant: bool) -> None:
    runs = Runs(calls=1)
    with idle_thread():
        y = checkpoint(runs, leaf(), use_reentrant=reentrant, preserve_rng_state=False)
        y.sum().backward()
    assert not torch.equal(runs.drawn[0][0], runs.drawn[1][0])


@REENTRANT
def test_a_graph_that_is_walked_twice(patched: None, reentrant: bool) -> None:
    runs = Runs()
    with idle_thread():
        y = checkpoint(runs, leaf(), use_reentrant=reentrant).sum()
        y.backward(retain_graph=True)
        y.backward()
    runs.assert_alike()
    assert len(runs.drawn) == 3


def test_threads_that_all_train(patched: None) -> None:
    barrier = threading.Barrier(3)

    def train() -> Any:
        for _ in range(20):
            masks: list[Any] = []

            def body(y: Any, masks: list[Any] = masks) -> Any:
                masks.append(torch.rand(64))
                return (y * masks[-1]).sin()

            y = leaf()
            barrier.wait(WAIT_S)
            checkpoint(body, y, use_reentrant=False).sum().backward()
            assert torch.equal(masks[0], masks[1])
            torch.testing.assert_close(y.grad, masks[0].cos() * 0 + (x * masks[0]).cos() * masks[0])
        return masks[0]

    masks = [worker.get() for worker in [Worker(train) for _ in range(3)]]
    assert not torch.equal(masks[0], masks[1])


def test_compiled_code_in_a_region(patched: None) -> None:
    @torch.compile(backend="aot_eager")
    def layer(y: Any) -> Any:
        return (y * torch.rand(64)).sin()

    def body(y: Any) -> Any:
        Worker(lambda: torch.rand(5)).get()
        return layer(layer(y))

    torch.manual_seed(1)
    torch.rand(5)
    first, second = torch.rand(64), torch.rand(64)
    y = leaf()
    wanted = ((y * first).sin() * second).sin().sum()
    (grad,) = torch.autograd.grad(wanted, y)
    with idle_thread():
        torch.manual_seed(1)
        checkpoint(body, y, use_reentrant=False).sum().backward()
    torch.testing.assert_close(y.grad, grad)


def test_taken_away_between_forward_and_backward() -> None:
    runs = Runs(calls=1)
    for reentrant in (False, True):
        runs.drawn.clear()
        with torchcompat.applied():
            y = checkpoint(lambda v: (v * torch.rand(64)).sin(), leaf(), use_reentrant=reentrant)
        before = state()
        y.sum().backward()
        assert torch.equal(before, state())
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::bernoulli_.float", "BackendSelect"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_forked_during_a_draw_can_draw(patched: None) -> None:
    checkpoint(lambda v: v.sin(), leaf(), use_reentrant=False)
    from torchcompat.patches import replayed_draws

    with replayed_draws._drawing:
        child = os.fork()
        if child == 0:
            torch.rand(3)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
