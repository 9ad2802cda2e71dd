"""fx_patcher: a trace in one thread, everything else in others, each interleaving forced."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as st
from interleaving import WAIT_S, Gate, Worker, module_calls, tracing
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchcompat

pytestmark = pytest.mark.usefixtures("patched")
x = torch.ones(2, 4)


def test_eager_calls_of_other_threads_do_not_meet_the_tracer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    want = model(x)
    with tracing(Gate()):
        torch.testing.assert_close(Worker(lambda: model(x)).get(), want)
        torch.testing.assert_close(model(x), want)


def test_module_attributes_read_by_other_threads_are_no_proxies() -> None:
    gate = Gate()
    with tracing(gate):
        assert Worker(lambda: gate.first.weight).get() is gate.first.weight
        assert isinstance(copy.deepcopy(gate.first).weight, nn.Parameter)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = gate.first.nothing


def test_parameters_read_by_the_tracing_thread_are_nodes() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, y: Any) -> Any:
            return y * self.scale

    traced = fx.symbolic_trace(Reads())
    assert [n.target for n in traced.graph.nodes if n.op == "get_attr"] == ["scale"]


@pytest.mark.parametrize("ends_first", [0, 1])
def test_overlapping_traces_each_get_their_graph(ends_first: int) -> None:
    gates = [Gate(), Gate()]
    workers = []
    for gate in gates:
        workers.append(Worker(lambda g=gate: fx.symbolic_trace(g)))
        assert gate.inside.wait(WAIT_S)
    for i in (ends_first, 1 - ends_first):
        gates[i].leave.set()
        assert module_calls(workers[i].get()) == ["first", "last"]
    nn.Linear(3, 3)(torch.ones(3))


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_wrapped_function_stays_for_the_trace_that_still_runs(ends_first: int) -> None:
    gates = [Gate(lambda y: y * math.sqrt(y.shape[0])) for _ in range(2)]
    workers = []
    for gate in gates:
        workers.append(Worker(lambda g=gate: fx.symbolic_trace(g)))
        assert gate.inside.wait(WAIT_S)
    for i in (ends_first, 1 - ends_first):
        gates[i].leave.set()
        targets = [n.target for n in workers[i].get().graph.nodes]
        assert sqrt in targets
    assert math.sqrt is sqrt


sqrt = math.sqrt


def test_a_compile_in_another_thread_leaves_the_trace_alone_and_sees_plain_modules() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.inner.register_forward_hook(lambda m, a, out: out + 1)
            self.scale = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return self.inner(y) * self.scale

    module, frames = Hooked(), []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        frames.append(gm)
        return gm.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    with tracing(Gate()):
        got = Worker(lambda: compiled(x)).get()
    torch.testing.assert_close(got, module(x))
    assert Worker(lambda: compiled(x)).get() is not None
    assert len(frames) == 1, "compiled again once the trace was over"
    with tracing(Gate()):
        Worker(lambda: compiled(x)).get()
    assert len(frames) == 1, "compiled again because somebody traces"


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"),
    reason="before torch 2.11 nothing compiles inside a trace",
)
def test_a_compile_inside_the_trace_itself_sees_plain_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compiled = torch.compile(lambda t: model(t), backend="eager", fullgraph=True)
    seen = []

    def compiles(y: Any) -> Any:
        with torch._dynamo.config.patch(force_compile_during_fx_trace=True):
            seen.append(compiled(x))
        return y

    gate = Gate(compiles)
    gate.leave.set()
    assert module_calls(fx.symbolic_trace(gate)) == ["first", "last"]
    torch.testing.assert_close(seen[0], model(x))


def test_a_trace_inside_a_trace() -> None:
    inner_graphs = []

    def traces(y: Any) -> Any:
        inner = Gate()
        inner.leave.set()
        inner_graphs.append(module_calls(fx.symbolic_trace(inner)))
        return y

    gate = Gate(traces)
    gate.leave.set()
    assert module_calls(fx.symbolic_trace(gate)) == ["first", "last"]
    assert inner_graphs == [["first", "last"]]


def test_a_module_called_twice_and_a_tracer_that_goes_inside() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, y: Any) -> Any:
            return self.block(self.block(y))

    class Inside(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, (nn.Linear, nn.ReLU))

    names = [n.target for n in Inside().trace(Twice()).nodes if n.op == "call_module"]
    assert names == ["block.0", "block.1", "block.0", "block.1"]


def test_a_tracer_that_calls_forward_itself() -> None:
    class Direct(fx.Tracer):
        def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return m.forward(*args, **kwargs)  # never the `forward` that it is handed

    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), nn.ReLU()))
    graph = Direct().trace(model)
    assert [n.op for n in graph.nodes].count("call_function") == 3


def test_an_error_inside_a_trace_comes_out_and_leaves_nothing_behind() -> None:
    def fails(_: Any) -> Any:
        raise KeyError("inside")

    gate = Gate(fails)
    gate.leave.set()
    with pytest.raises(KeyError, match="inside"):
        fx.symbolic_trace(gate)
    assert st.CURRENT_PATCHER is None
    assert math.sqrt is sqrt
    nn.Linear(4, 4)(x)


def test_make_fx_in_two_threads_overlapping() -> None:
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(y: torch.Tensor) -> torch.Tensor:
        first_in.set()
        assert second_in.wait(WAIT_S)
        return y.cos()

    def second(y: torch.Tensor) -> torch.Tensor:
        second_in.set()
        assert first_out.wait(WAIT_S)
        return y.sin()

    a = Worker(lambda: make_fx(first)(x))
    assert first_in.wait(WAIT_S)
    b = Worker(lambda: make_fx(second)(x))
    torch.testing.assert_close(a.get()(x), x.cos())
    first_out.set()
    torch.testing.assert_close(b.get()(x), x.sin())


def test_unapply_while_a_trace_runs_lets_it_end_as_it_began() -> None:
    gate = Gate()
    with tracing(gate):
        torchcompat.unapply()
        nn.Linear(4, 4)(x)
        Worker(lambda: nn.Linear(4, 4)(x)).get()
    assert module_calls(fx.symbolic_trace(nn.Sequential(nn.ReLU()))) == ["0"]
    torchcompat.apply()


def test_apply_while_a_stock_trace_runs() -> None:
    torchcompat.unapply()
    call, gate = nn.Module.__call__, Gate()
    with tracing(gate):
        torchcompat.apply()
    assert nn.Module.__call__ is call
    with tracing(Gate()):
        Worker(lambda: nn.Linear(4, 4)(x)).get()
