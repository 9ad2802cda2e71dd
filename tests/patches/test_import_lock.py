"""import_lock: tracing does not wait for imports of other threads."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import convert_frame, symbolic_convert

import torchcompat

x = torch.ones(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


class Import:
    """A module whose import stands still in its body, in a thread of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.name = name
        text = (
            "import sys\n"
            "FACTOR = 3.0\n"
            "def scaled(y): return y * FACTOR\n"
            f"sys.import_test_{name}()\n"
            "LATE = 1\n"
        )
        (folder / f"{name}.py").write_text(text)
        setattr(sys, f"import_test_{name}", self._stand_still)
        self.worker = Worker(lambda: importlib.import_module(name))
        assert self.inside.wait(WAIT_S)

    def _stand_still(self) -> None:
        self.inside.set()
        assert self.leave.wait(WAIT_S)


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    monkeypatch.syspath_prepend(tmp_path)
    one = Import(tmp_path, "half_imported_by_a_test")
    yield one
    one.leave.set()
    one.worker.get()
    del sys.modules[one.name]
    delattr(sys, f"import_test_{one.name}")


def test_a_function_of_a_half_imported_module_is_compiled(patched: None, standing: Import) -> None:
    scaled: Any = sys.modules[standing.name].scaled
    compiled = torch.compile(lambda y: scaled(y) + 1, backend="eager")
    worker = Worker(lambda: compiled(x))
    worker.join(10)
    assert not worker.is_alive(), "the compile waits for the import"
    torch.testing.assert_close(worker.get(), x * 3 + 1)


def test_who_does_not_compile_waits_as_ever(patched: None, standing: Import) -> None:
    shim: Any = symbolic_convert.importlib
    worker: Any = Worker(lambda: shim.import_module(standing.name).LATE)
    worker.join(0.3)
    waited = worker.is_alive()
    standing.leave.set()
    assert worker.get() == 1
    assert waited


def test_a_module_that_is_not_there_yet_is_imported(
    patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "whole_module_of_a_test.py").write_text("VALUE = 5\n")
    shim: Any = symbolic_convert.importlib
    with convert_frame.compile_lock:
        assert shim.import_module("whole_module_of_a_test").VALUE == 5
    del sys.modules["whole_module_of_a_test"]
    with pytest.raises(ModuleNotFoundError):
        shim.import_module("no_such_module_of_a_test")


def test_everything_else_is_importlibs() -> None:
    stock = symbolic_convert.importlib
    with torchcompat.applied(only=["import_lock"]):
        shim: Any = symbolic_convert.importlib
        assert isinstance(shim, ModuleType)
        assert shim is not importlib
        assert shim.reload is importlib.reload
    assert symbolic_convert.importlib is stock
