"""pre_dispatch_modes: what one thread traces before dispatch is not under way in the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

x = torch.randn(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


def targets(graph_module: Any) -> list[str]:
    return [str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"]


@contextmanager
def standing_trace() -> Iterator[None]:
    """A trace before dispatch in another thread, in its middle for the body; whole at the end."""
    inside, leave = threading.Event(), threading.Event()

    def held(y: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert leave.wait(WAIT_S)
        return y.sin() + 1

    worker = Worker(lambda: make_fx(held, pre_dispatch=True)(x))
    assert inside.wait(WAIT_S)
    try:
        yield
    finally:
        leave.set()
    assert targets(worker.get()) == ["aten.sin.default", "aten.add.Tensor"]


@pytest.mark.usefixtures("patched")
def test_a_thread_that_traces_nothing_finds_no_tracer() -> None:
    with standing_trace():
        assert get_proxy_mode() is None


@pytest.mark.usefixtures("patched")
def test_a_trace_inside_of_another_has_its_own_modes() -> None:
    with standing_trace():
        graph = make_fx(lambda y: y.cos(), tracing_mode="symbolic", pre_dispatch=True)(x)
        assert targets(graph) == ["aten.cos.default"]


@pytest.mark.usefixtures("patched")
def test_a_compile_with_sizes_beside_a_trace() -> None:
    with standing_trace():
        compiled = torch.compile(lambda y: y.tan() * y.shape[0], backend="eager", dynamic=True)
        torch.testing.assert_close(compiled(x), x.tan() * 4)


@pytest.mark.usefixtures("patched")
def test_an_export_beside_a_trace() -> None:
    with standing_trace():
        program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),), strict=False)
    assert "aten.linear.default" in targets(program.graph_module)


@pytest.mark.usefixtures("patched")
def test_a_trace_finds_its_own_tracer_inside() -> None:
    found: list[Any] = []

    def traced(y: torch.Tensor) -> torch.Tensor:
        found.append(get_proxy_mode())
        return y.sin()

    with standing_trace():
        make_fx(traced, pre_dispatch=True)(x)
    assert found[0] is not None
    assert get_proxy_mode() is None
