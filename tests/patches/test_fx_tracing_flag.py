"""fx_tracing_flag: compiled calls beside traces. Green without the patch from torch 2.14 on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as st
from interleaving import WAIT_S, Gate, Worker, tracing
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchcompat

x = torch.ones(2, 4)
REFUSED = "using FX to symbolically trace"


def compiled_function() -> Callable[..., Any]:
    compiled = torch.compile(lambda y: y.sin() + 1, backend="eager")
    compiled(x)
    return compiled


def test_a_function_compiled_before_apply_runs_beside_a_trace() -> None:
    compiled = compiled_function()
    with torchcompat.applied(), tracing(Gate()):
        torch.testing.assert_close(Worker(lambda: compiled(x)).get(), x.sin() + 1)
    torch._dynamo.reset()


def test_a_first_compile_runs_beside_a_trace(patched: None) -> None:
    with tracing(Gate()):
        got = Worker(lambda: torch.compile(lambda y: y.cos(), backend="aot_eager")(x)).get()
    torch.testing.assert_close(got, x.cos())


def test_overlapping_traces_leave_nothing_set(patched: None) -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(y: torch.Tensor) -> torch.Tensor:
        first_in.set()
        assert second_in.wait(WAIT_S)
        return y.cos()

    def second(y: torch.Tensor) -> torch.Tensor:
        second_in.set()
        assert first_out.wait(WAIT_S)
        assert st.is_fx_tracing()
        return y.sin()

    a = Worker(lambda: make_fx(first)(x))
    assert first_in.wait(WAIT_S)
    b = Worker(lambda: make_fx(second)(x))
    a.get()
    first_out.set()
    b.get()
    assert not st.is_fx_tracing()
    compiled_function()(x)


@pytest.mark.parametrize("where", ["main thread", "worker thread"])
@pytest.mark.parametrize("how", ["make_fx", "symbolic_trace"])
def test_a_deliberate_trace_in_the_same_thread_is_still_refused(
    patched: None, where: str, how: str
) -> None:
    compiled = compiled_function()

    class Holder(nn.Module):
        def forward(self, y: Any) -> Any:
            return compiled(y) + 1

    def trace() -> Any:
        if how == "make_fx":
            return make_fx(lambda y: compiled(y) + 1)(x)
        return fx.symbolic_trace(Holder())

    with pytest.raises(RuntimeError, match=REFUSED):
        trace() if where == "main thread" else Worker(trace).get()


def test_the_documented_way_out_still_works(patched: None) -> None:
    compiled = compiled_function()
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        traced = make_fx(lambda y: compiled(y) + 1)(x)
    torch.testing.assert_close(traced(x), x.sin() + 2)


@pytest.mark.skipif(
    "_is_fx_tracing_flag" not in vars(st), reason="this torch keeps the flag per thread itself"
)
def test_a_flag_that_is_stuck_is_cured_and_stays_cured() -> None:
    compiled = compiled_function()
    st._is_fx_tracing_flag = True  # what two overlapping traces leave behind on stock torch
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(x)
    with torchcompat.applied():
        compiled(x)
        assert st._is_fx_tracing_flag is False
        st._is_fx_tracing_flag = True  # a writer from outside writes for its own thread
        assert Worker(st.is_fx_tracing).get() is False
        assert st.is_fx_tracing() is True
        st._is_fx_tracing_flag = False
    assert st._is_fx_tracing_flag is False
    compiled(x)
