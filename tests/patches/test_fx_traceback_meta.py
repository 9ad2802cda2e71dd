from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

x = torch.randn(4)


def stack_traces(graph_module: Any) -> list[Any]:
    return [n.stack_trace for n in graph_module.graph.nodes if n.op == "call_function"]


def test_each_thread_marks_its_own_nodes(patched: None) -> None:
    inside, marked = threading.Event(), threading.Event()

    def traced(y: Any) -> Any:
        inside.set()
        assert marked.wait(WAIT_S)
        return y.sin()

    def trace() -> Any:
        with fx_traceback.preserve_node_meta():
            fx_traceback.set_stack_trace(["theirs"])
            return make_fx(traced)(x)

    worker = Worker(trace)
    assert inside.wait(WAIT_S)
    assert not fx_traceback.has_preserved_node_meta()
    assert fx_traceback.current_meta == {}
    with fx_traceback.preserve_node_meta():
        fx_traceback.set_stack_trace(["mine"])
        marked.set()
        assert stack_traces(worker.get()) == ["theirs"]
        assert stack_traces(make_fx(lambda y: y.cos())(x)) == ["mine"]
    assert fx_traceback.current_meta == {}


def test_blocks_that_overlap_leave_nothing_behind(patched: None) -> None:
    def block(inside: threading.Event, leave: threading.Event) -> None:
        with fx_traceback.preserve_node_meta():
            fx_traceback.current_meta["note"] = threading.get_ident()
            inside.set()
            assert leave.wait(WAIT_S)
            assert fx_traceback.current_meta["note"] == threading.get_ident()

    events = [threading.Event() for _ in range(4)]
    first = Worker(lambda: block(events[0], events[1]))
    assert events[0].wait(WAIT_S)
    second = Worker(lambda: block(events[2], events[3]))
    assert events[2].wait(WAIT_S)
    events[1].set()
    first.get()
    events[3].set()
    second.get()
    assert not fx_traceback.has_preserved_node_meta()
    assert "note" not in fx_traceback.current_meta


@pytest.mark.skipif(not hasattr(fx_traceback, "annotate"), reason="not in this torch")
def test_an_annotation_tags_nodes_of_its_thread(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with fx_traceback.annotate({"who": "another thread"}):
            inside.set()
            assert leave.wait(WAIT_S)

    worker = Worker(hold)
    assert inside.wait(WAIT_S)
    with fx_traceback.preserve_node_meta():
        plain = make_fx(lambda y: y.sin())(x)
        with fx_traceback.annotate({"who": "this thread"}):
            tagged = make_fx(lambda y: y.sin())(x)
    leave.set()
    worker.get()

    def tags(graph_module: Any) -> list[Any]:
        nodes = graph_module.graph.nodes
        return [n.meta.get("custom") for n in nodes if n.op == "call_function"]

    assert tags(plain) == [None]
    assert tags(tagged) == [{"who": "this thread"}]
