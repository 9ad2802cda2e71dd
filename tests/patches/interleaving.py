"""What the tests of the patches share: threads that keep their error, gates inside traced code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

WAIT_S = 30.0


class Worker(threading.Thread):
    """A started thread; `get` waits, bounded, and raises what the thread raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as e:
            self._error = e

    def get(self) -> Any:
        self.join(WAIT_S)
        assert not self.is_alive(), "thread stuck"
        if self._error is not None:
            raise self._error
        return self._result


class Gate(nn.Module):
    """Calls `first`, stands still, runs `middle`, calls `last`."""

    def __init__(self, middle: Callable[[Any], Any] = lambda y: y) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = middle
        self.inside, self.leave = threading.Event(), threading.Event()

    def forward(self, y: Any) -> Any:
        y = self.first(y)
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        return self.last(self.middle(y))


@contextmanager
def tracing(gate: Gate) -> Iterator[Worker]:
    """A trace of `gate` in another thread that stands still for the body; check its graph after."""
    worker = Worker(lambda: fx.symbolic_trace(gate))
    assert gate.inside.wait(WAIT_S)
    try:
        yield worker
    finally:
        gate.leave.set()
    assert module_calls(worker.get()) == ["first", "last"]


def module_calls(traced: fx.GraphModule) -> list[Any]:
    return [n.target for n in traced.graph.nodes if n.op == "call_module"]
