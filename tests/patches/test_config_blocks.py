from __future__ import annotations

import threading

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import config
from torch._dynamo.utils import disable_cache_limit
from torch._higher_order_ops.utils import _set_compilation_env

pytestmark = pytest.mark.skipif(
    not hasattr(config, "recompile_limit"), reason="the limit has another name in this torch"
)


def seen() -> tuple[int, bool]:
    return int(config.recompile_limit), bool(config.allow_empty_graphs)


class Inside:
    """A thread inside both blocks, until it is let go."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> tuple[int, bool]:
        with disable_cache_limit(), _set_compilation_env():
            self.inside.set()
            assert self.leave.wait(WAIT_S)
            return seen()

    def end(self) -> tuple[int, bool]:
        self.leave.set()
        found: tuple[int, bool] = self.worker.get()
        return found


def test_blocks_that_overlap_keep_to_their_threads(patched: None) -> None:
    before = seen()
    first, second = Inside(), Inside()
    assert seen() == before
    assert first.end()[0] > before[0]
    limit, empty = second.end()
    assert limit > before[0]
    assert empty is True
    assert seen() == Worker(seen).get() == before


def test_an_error_inside_is_the_blocks_own_and_leaves_nothing(patched: None) -> None:
    before = seen()
    with pytest.raises(ZeroDivisionError), disable_cache_limit():
        raise ZeroDivisionError
    assert seen() == before
    config.recompile_limit = before[0] + 1
    assert Worker(seen).get()[0] == before[0] + 1


def test_cond_in_eager_still_runs(patched: None) -> None:
    x = torch.ones(3)
    found = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
    torch.testing.assert_close(found, x.sin())
