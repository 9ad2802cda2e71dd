from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker

x = torch.randn(3)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_default_device(None)


class Counting:
    """A function compiled by a backend that counts."""

    def __init__(self) -> None:
        self.compiles = 0
        self.call = torch.compile(lambda y: y + torch.ones(3), backend=self, dynamic=False)

    def __call__(self, graph: Any, _: Any) -> Any:
        self.compiles += 1
        return graph.forward


class Chooser:
    """A thread with a default device of its own, until it is let go."""

    def __init__(self, device: str) -> None:
        self.chosen, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(lambda: self.run(device))
        assert self.chosen.wait(WAIT_S)

    def run(self, device: str) -> Any:
        torch.set_default_device(device)
        self.chosen.set()
        assert self.leave.wait(WAIT_S)
        return torch.utils._device.CURRENT_DEVICE

    def end(self) -> Any:
        self.leave.set()
        return self.worker.get()


def test_another_threads_choice_recompiles_nothing_here(patched: None) -> None:
    function = Counting()
    function.call(x)
    chooser = Chooser("meta")
    assert torch.utils._device.CURRENT_DEVICE is None
    torch.testing.assert_close(function.call(x), x + 1)
    assert function.compiles == 1
    assert chooser.end() == torch.device("meta")


def test_what_is_compiled_beside_another_choice_serves_this_thread(patched: None) -> None:
    chooser = Chooser("meta")
    function = Counting()
    for _ in range(3):
        torch.testing.assert_close(function.call(x), x + 1)
    chooser.end()
    torch.testing.assert_close(Worker(lambda: function.call(x)).get(), x + 1)
    assert function.compiles == 1


def test_a_choice_of_ones_own_is_another_specialisation(patched: None) -> None:
    seen: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append("")
        return graph.forward

    make = torch.compile(lambda: torch.ones(2), backend=backend)
    assert make().device.type == "cpu"
    with torch.device("meta"):
        assert make().device.type == "meta"
        assert make().device.type == "meta"
    assert make().device.type == "cpu"
    assert len(seen) == 2
