"""One lock for torch's modules: who waits for whom, and what is left alone."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from interleaving import Worker

import torchcompat

torch: Any = pytest.importorskip("torch")
BOOTSTRAP: Any = importlib._bootstrap  # type: ignore[attr-defined]


@pytest.fixture
def patched() -> Any:
    with torchcompat.applied(only=["first_import"]):
        yield


def names(*modules: str) -> set[int]:
    return {id(BOOTSTRAP._get_module_lock(name)) for name in modules}


@pytest.mark.usefixtures("patched")
def test_torch_and_its_modules_have_one_lock_and_others_their_own() -> None:
    assert len(names("torch", "torch._dynamo", "torch._dynamo.utils", "torch.new")) == 1
    kept = [BOOTSTRAP._get_module_lock(n) for n in ("torchvision", "torch_x", "torch.a")]
    assert len({id(lock) for lock in kept}) == 3


def test_taken_away_the_locks_are_pythons_own() -> None:
    before = BOOTSTRAP._get_module_lock
    with torchcompat.applied(only=["first_import"]):
        assert BOOTSTRAP._get_module_lock is not before
    assert BOOTSTRAP._get_module_lock is before


def test_an_import_under_way_keeps_its_lock() -> None:
    mine = BOOTSTRAP._get_module_lock("torch.under_way")
    mine.acquire()
    try:
        with torchcompat.applied(only=["first_import"]):
            assert BOOTSTRAP._get_module_lock("torch.under_way") is mine
            assert BOOTSTRAP._get_module_lock("torch.other") is not mine
    finally:
        mine.release()


@pytest.fixture
def circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two packages below torch that import each other, and wait in their bodies for `meet`."""
    for name, other in (("tc_one", "tc_two"), ("tc_two", "tc_one")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(
            f"import torch\ntorch.tc_meet({name!r})\n"
            f"import torch.{other}.part\nfrom torch.{name}.part import there\n"
        )
        (folder / "part.py").write_text("there = 1\n")
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    inside: dict[str, threading.Event] = {n: threading.Event() for n in ("tc_one", "tc_two")}

    def meet(name: str) -> None:
        inside[name].set()
        for event in inside.values():
            event.wait(1.0)  # with the patch the other cannot come

    monkeypatch.setattr(torch, "tc_meet", meet, raising=False)
    yield
    for name in [n for n in sys.modules if n.startswith("torch.tc_")]:
        del sys.modules[name]
    for name in ("tc_one", "tc_two"):
        vars(torch).pop(name, None)


def import_both() -> list[Exception]:
    """Each thread enters the circle at its own place; their errors."""
    workers = [
        Worker(lambda name=name: importlib.import_module(name))
        for name in ("torch.tc_one.part", "torch.tc_two.part")
    ]
    errors: list[Exception] = []
    for worker in workers:
        try:
            worker.get()
        except (ImportError, KeyError, RuntimeError) as e:  # a _DeadlockError is the last
            errors.append(e)
    return errors


@pytest.mark.usefixtures("patched", "circle")
def test_two_threads_go_through_a_circle() -> None:
    assert import_both() == []
    assert sys.modules["torch.tc_one.part"].there == sys.modules["torch.tc_two.part"].there == 1


@pytest.mark.usefixtures("circle")
def test_without_the_patch_they_do_not() -> None:
    assert import_both()
