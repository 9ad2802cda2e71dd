"""export_threads: only the thread that exports is exporting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import nn
from torch._export.utils import _compiling_state_context

import torchcompat

pytestmark = pytest.mark.skipif(
    not hasattr(torch.compiler, "_is_exporting_flag"), reason="this torch has no such flag"
)
x = torch.ones(4)
answers: list[bool] = []  # an attribute of the module would be taken back by the export
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


class Standing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        answers.append(torch.compiler.is_exporting())
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        return y + 1


@contextmanager
def exporting() -> Iterator[None]:
    answers.clear()
    model = Standing()
    worker = Worker(lambda: torch.export.export(model, (x,), strict=False))
    assert model.inside.wait(WAIT_S)
    try:
        yield
    finally:
        model.leave.set()
    worker.get()
    assert answers == [True]


def test_a_model_compiled_beside_an_export_is_compiled(patched: None) -> None:
    compiles: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        compiles.append("")
        return gm.forward

    with exporting():
        compiled = torch.compile(nn.Linear(4, 4), backend=backend)
    compiled(x)
    assert compiles


def test_other_threads_are_not_exporting(patched: None) -> None:
    with exporting():
        assert torch.compiler.is_exporting() is False
        assert Worker(torch.compiler.is_exporting).get() is False


def test_what_overlaps_leaves_nothing_set(patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # The context sets another flag too, which this patch leaves to another: put it back after.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)
    begun, leave = threading.Event(), threading.Event()

    def second() -> bool:
        with _compiling_state_context():
            begun.set()
            assert leave.wait(WAIT_S)
            return torch.compiler.is_exporting()

    with _compiling_state_context():
        worker = Worker(second)
        assert begun.wait(WAIT_S)
    assert torch.compiler.is_exporting() is False
    leave.set()
    assert worker.get() is True
    assert torch.compiler.is_exporting() is False


def test_the_flag_of_the_module_is_the_threads(patched: None) -> None:
    torch.compiler._is_exporting_flag = True
    try:
        assert torch.compiler.is_exporting() is True
        assert Worker(torch.compiler.is_exporting).get() is False
    finally:
        torch.compiler._is_exporting_flag = False


def test_function_and_module_are_restored() -> None:
    function, cls = torch.compiler.is_exporting, type(torch.compiler)
    code = function.__code__
    with torchcompat.applied(only=["export_threads"]):
        assert torch.compiler.is_exporting is function
    assert (function.__code__, type(torch.compiler)) == (code, cls)


def test_an_export_that_ends_leaves_another_its_module_hierarchy(patched: None) -> None:
    standing = Standing()
    worker = Worker(lambda: torch.export.export(standing, (x,), strict=False))
    assert standing.inside.wait(WAIT_S)
    try:
        torch.export.export(nn.Linear(4, 4), (x,), strict=False)
    finally:
        standing.leave.set()
    # Without the signature of the calls the export has raised before.
    assert [entry.fqn for entry in worker.get().module_call_graph] == [""]
