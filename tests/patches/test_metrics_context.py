from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import utils
from torch._dynamo.backends.common import aot_autograd

import torchcompat

pytestmark = pytest.mark.skipif(
    hasattr(utils, "_metrics_context_tls"), reason="the figures are per thread in this torch"
)


def step(forward: Any, backward: Any) -> torch.Tensor:
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda y: y.sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    return x.grad


def as_it_is(gm: Any, example_inputs: Any) -> Any:
    return gm


class Stop:
    """A compiler that stands still until it is let go."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        return gm


@pytest.fixture(autouse=True)
def _main_thread_first() -> None:
    """A CUDA build without a GPU crashes unless the first compile is the main thread's."""
    torch.compile(lambda y: y + 1, backend="eager")(torch.ones(1))


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_backward_compiles_while_another_thread_compiles(patched: None, stage: str) -> None:
    stop = Stop()
    compilers = (stop, as_it_is) if stage == "forward" else (as_it_is, stop)
    compiled = torch.compile(
        lambda y: y.cos().sum(), backend=aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)
    )
    x = torch.ones(3, requires_grad=True)
    loss = compiled(x)
    first = Worker(lambda: step(*compilers))
    assert stop.inside.wait(WAIT_S)
    assert not utils.get_metrics_context().in_progress()
    loss.backward()
    stop.leave.set()
    torch.testing.assert_close(first.get(), torch.ones(3).cos())
    torch.testing.assert_close(x.grad, -torch.ones(3).sin())


def test_each_thread_reports_its_own_figures(patched: None) -> None:
    both = threading.Barrier(2)

    def collect(value: int) -> dict[str, Any]:
        context = utils.get_metrics_context()
        seen: list[dict[str, Any]] = []
        context._on_exit = lambda start, end, metrics, *error: seen.append(dict(metrics))
        with context:
            both.wait(WAIT_S)
            context.set("co_name", value)
            both.wait(WAIT_S)
        return seen[0]

    workers = [Worker(lambda i=i: collect(i)) for i in (1, 2)]
    assert [w.get() for w in workers] == [{"co_name": 1}, {"co_name": 2}]


def test_the_main_threads_context_is_the_one_that_was_there() -> None:
    before = utils.get_metrics_context()
    with torchcompat.applied(only=["metrics_context"]):
        assert utils.get_metrics_context() is before is utils._METRICS_CONTEXT
        assert Worker(utils.get_metrics_context).get() is not before
    assert Worker(utils.get_metrics_context).get() is before
