from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo.exc import Unsupported

pytestmark = pytest.mark.skipif(
    not hasattr(torch._dynamo, "error_on_graph_break"), reason="not in this torch"
)
x = torch.randn(4)


def breaking() -> Any:
    @torch.compile(backend="eager")
    def function(y: Any) -> Any:
        y = y.sin()
        torch._dynamo.graph_break()
        return y + 1

    return function


class Strict:
    """A thread that stands inside the block until it is let go."""

    def __init__(self, value: bool = True) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.value = value
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> bool:
        with torch._dynamo.error_on_graph_break(self.value):
            self.inside.set()
            assert self.leave.wait(WAIT_S)
            return bool(torch._dynamo.utils._get_error_on_graph_break())

    def end(self) -> bool:
        self.leave.set()
        return bool(self.worker.get())


def test_a_strict_block_elsewhere_does_not_forbid_breaks_here(patched: None) -> None:
    strict = Strict()
    torch.testing.assert_close(breaking()(x), x.sin() + 1)
    assert strict.end() is True


def test_blocks_that_overlap_leave_nothing_behind(patched: None) -> None:
    first = Strict()
    second = Strict()
    assert first.end() is True
    assert second.end() is True
    assert torch._dynamo.utils._error_on_graph_break is False
    torch.testing.assert_close(breaking()(x), x.sin() + 1)


def test_a_lenient_block_elsewhere_does_not_lift_fullgraph_here(patched: None) -> None:
    def broken(y: Any) -> Any:
        torch._dynamo.graph_break()
        return y + 1

    lenient = Strict(value=False)
    with pytest.raises(Unsupported):
        torch.compile(broken, backend="eager", fullgraph=True)(x)
    assert lenient.end() is False


def test_the_block_still_forbids_in_its_own_thread(patched: None) -> None:
    function = breaking()

    def strictly() -> None:
        with torch._dynamo.error_on_graph_break(True):
            function(x)

    with pytest.raises(Unsupported):
        strictly()
    with pytest.raises(Unsupported):
        Worker(strictly).get()
