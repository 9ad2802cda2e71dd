"""forward_ad_threads: a second jvp at the same time is refused, not wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from interleaving import WAIT_S, Worker

x = torch.tensor([1.0, 2.0, 3.0])
one = torch.ones(3)


def cosine() -> torch.Tensor:
    return torch.func.jvp(torch.sin, (x,), (one,))[1]


def test_a_second_jvp_is_refused_until_the_first_ends(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    def standing(y: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert leave.wait(WAIT_S)
        return y.sin()

    first = Worker(lambda: torch.func.jvp(standing, (x,), (one,))[1])
    assert inside.wait(WAIT_S)
    try:
        with pytest.raises(RuntimeError, match="another thread is inside one"):
            cosine()
        with pytest.raises(RuntimeError, match="another thread is inside one"):
            torch.func.jacfwd(torch.sin)(x)
    finally:
        leave.set()
    torch.testing.assert_close(first.get(), x.cos())
    torch.testing.assert_close(cosine(), x.cos())


def test_nesting_in_one_thread_works(patched: None) -> None:
    second = torch.func.jvp(lambda y: torch.func.jvp(torch.sin, (y,), (one,))[1], (x,), (one,))[1]
    torch.testing.assert_close(second, -x.sin())
    torch.testing.assert_close(torch.func.hessian(lambda y: (y**3).sum())(x), torch.diag(6 * x))


def test_a_jvp_that_fails_leaves_the_way_free(patched: None) -> None:
    def failing(y: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch.func.jvp(failing, (x,), (one,))
    torch.testing.assert_close(Worker(cosine).get(), x.cos())


def test_a_compiled_jvp_works(patched: None) -> None:
    compiled = torch.compile(cosine, backend="eager")
    torch.testing.assert_close(compiled(), x.cos())
    torch.testing.assert_close(Worker(compiled).get(), x.cos())
