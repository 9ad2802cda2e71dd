from __future__ import annotations

import threading
from typing import Any

import torch
from interleaving import WAIT_S, Worker
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

x = torch.randn(4)


def cond_of(inside: threading.Event, leave: threading.Event) -> Any:
    def traced(y: Any) -> Any:
        inside.set()
        assert leave.wait(WAIT_S)
        return torch.cond(y.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (y,))

    return traced


def gated(inside: threading.Event, leave: threading.Event) -> Any:
    def traced(y: Any) -> Any:
        inside.set()
        assert leave.wait(WAIT_S)
        return y.tan()

    return traced


def targets(graph_module: Any) -> list[Any]:
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def test_a_trace_that_ends_inside_another_leaves_it_its_tracer(patched: None) -> None:
    events = [threading.Event() for _ in range(4)]
    other = Worker(lambda: make_fx(gated(*events[:2]))(x))
    assert events[0].wait(WAIT_S)
    first = Worker(lambda: make_fx(cond_of(*events[2:]), tracing_mode="symbolic")(x))
    assert events[2].wait(WAIT_S)
    events[1].set()
    other.get()
    events[3].set()
    assert torch.ops.higher_order.cond in targets(first.get())


def test_two_conds_at_once_each_land_in_their_own_trace(patched: None) -> None:
    leave = threading.Event()
    insides = [threading.Event(), threading.Event()]
    workers = [
        Worker(lambda inside=inside: make_fx(cond_of(inside, leave), tracing_mode="symbolic")(x))
        for inside in insides
    ]
    for inside in insides:
        assert inside.wait(WAIT_S)
    leave.set()
    for worker in workers:
        assert targets(worker.get()).count(torch.ops.higher_order.cond) == 1
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None


def test_outside_of_a_trace_there_is_still_none(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()
    worker = Worker(lambda: make_fx(gated(inside, leave))(x))
    assert inside.wait(WAIT_S)
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
    leave.set()
    worker.get()
