"""export_load: exported programs are loaded side by side."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._export.serde import serialize

x = torch.ones(4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.sin() * self.weight


@pytest.fixture
def saved() -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x,)), buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.export.load(io.BytesIO(data)).module()(x).detach()


def test_a_load_beside_a_load(patched: None, saved: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    stock: Any = serialize.GraphModuleDeserializer.deserialize_graph

    def hold_the_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not inside.is_set():
            inside.set()
            assert leave.wait(WAIT_S)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(serialize.GraphModuleDeserializer, "deserialize_graph", hold_the_first)
    first = Worker(lambda: load(saved))
    assert inside.wait(WAIT_S)
    try:
        torch.testing.assert_close(Worker(lambda: load(saved)).get(), x.sin() * 2)
    finally:
        leave.set()
    torch.testing.assert_close(first.get(), x.sin() * 2)


def test_a_load_that_fails_does_not_stop_the_next(patched: None, saved: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017 - what a damaged file raises is torch's
        load(saved[: len(saved) // 2])
    torch.testing.assert_close(load(saved), x.sin() * 2)
