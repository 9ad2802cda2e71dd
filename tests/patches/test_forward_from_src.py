from __future__ import annotations

import threading
from typing import Any

import torch
from interleaving import WAIT_S, Worker
from torch import fx
from torch._dynamo import convert_frame
from torch.fx import graph_module

import torchcompat


class Compiling:
    """A thread that stands still in a compile, until it is let go."""

    def __init__(self) -> None:
        # A CUDA build without a GPU crashes unless the first compile is the main thread's.
        torch.compile(lambda y: y - 1, backend="eager")(torch.ones(1))
        self.inside, self.leave = threading.Event(), threading.Event()
        self.made: list[Any] = []
        self.worker = Worker(
            lambda: torch.compile(lambda y: y + 1, backend=self.backend)(torch.ones(3))
        )
        assert self.inside.wait(WAIT_S)

    def backend(self, gm: Any, example_inputs: Any) -> Any:
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        self.made.append(graph_module._forward_from_src)
        return gm

    def end(self) -> None:
        self.leave.set()
        torch.testing.assert_close(self.worker.get(), torch.full((3,), 2.0))


def sine() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.sin, (graph.placeholder("y"),)))
    return fx.GraphModule(torch.nn.Module(), graph)


def compiles(module: fx.GraphModule) -> int:
    graphs: list[Any] = []

    def count(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.testing.assert_close(
        torch.compile(module, backend=count, fullgraph=True)(torch.ones(3)), torch.ones(3).sin()
    )
    return len(graphs)


def test_made_or_recompiled_during_another_threads_compile(patched: None) -> None:
    before = sine()
    compiling = Compiling()
    made = sine()
    before.recompile()
    compiling.end()
    assert (compiles(made), compiles(before)) == (1, 1)


def test_what_a_compile_makes_itself_is_still_skipped(patched: None) -> None:
    compiling = Compiling()
    compiling.end()
    assert compiling.made == [convert_frame.fx_forward_from_src_skip_result]
    assert Worker(lambda: graph_module._forward_from_src).get() is graph_module._forward_from_src


def test_applied_and_taken_away_during_a_compile() -> None:
    own = graph_module._forward_from_src
    compiling = Compiling()
    with torchcompat.applied(only=["forward_from_src"]):
        made = sine()
        compiling.end()
    assert graph_module._forward_from_src is own
    assert compiles(made) == 1
