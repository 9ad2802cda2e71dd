"""fullgraph_counter: one counter of compiled frames for all threads' fullgraph calls.

A call compiled with `fullgraph=True` sets a counter in C to 0, runs, and takes "still 0" for
"nothing was compiled and nothing compiled was found". The end of another thread's call switches the
counter off in between and the beginning of the next one sets it to 0, so a call whose code was
compiled long ago raises, on the hot path, "torch.compile with fullgraph=True found no compiled
frames". torch 2.12 only warns; 2.13 and 2.14 raise; 2.15 counts
per thread.

`torch._dynamo.eval_frame` calls the C function through a global of its own, which becomes an object
that knows who is inside: a call that was alone from its beginning to its end is judged by the
counter as before, a call that another thread's overlapped is not judged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from torchcompat.patch import Patch, Value
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

from .c_flags import is_shared

_EVAL_FRAME = "torch._dynamo.eval_frame"
_NAME = "set_fullgraph_compiled_frame_count"
_OFF = -1


class _Inside(threading.local):
    """This thread's outermost fullgraph call: when it began, and whether it has company."""

    since = _OFF
    """Number of the beginning; `_OFF` outside of a call."""


class FrameCount:
    """Stands for the C function: `count(0)` begins a call, `count(-1)` ends it; both return what
    the C function would, except that a call that was not alone is always told of one frame."""

    def __init__(self, real: Callable[[int], int]) -> None:
        self._real = real
        self._mine = _Inside()
        self._lock = threading.Lock()
        self._inside = 0
        self._beginnings = 0

    def __call__(self, value: int) -> int:
        if value == 0:
            return self._begin()
        if value == _OFF:
            return self._end()
        return self._real(value)

    def _begin(self) -> int:
        if self._mine.since != _OFF:  # nested: the outermost call is the one that is judged
            return self._real(0)
        with self._lock:
            self._beginnings += 1
            self._inside += 1
            # With company the counter is nobody's: 0 is never the newest beginning at the end.
            self._mine.since = self._beginnings if self._inside == 1 else 0
            self._real(0)
        return _OFF

    def _end(self) -> int:
        since = self._mine.since
        if since == _OFF:  # a second ending of one call, as its `finally` makes
            return _OFF
        self._mine.since = _OFF
        with self._lock:
            self._inside -= 1
            count = self._real(_OFF if self._inside == 0 else 0)
            return count if since == self._beginnings else max(count, 1)


def _recognise() -> Finding:
    """Whether the counter is one for all threads, asked of the C function itself."""
    real: Any = vars(sys.modules[_EVAL_FRAME]).get(_NAME)
    if isinstance(real, FrameCount):
        return Finding("ok", "the counter of fullgraph calls is one for all threads")
    if not callable(real):
        return Finding("missing", f"{_EVAL_FRAME}:{_NAME} is not in this torch")
    if is_shared(real, _OFF, 3):
        return Finding("ok", "the counter of fullgraph calls is one for all threads")
    return Finding("fixed", "the counter of fullgraph calls is per thread here")


PATCH = Patch(
    id="fullgraph_counter",
    title="fullgraph calls of several threads must not take each other for failed",
    why=(
        "Calls compiled with fullgraph=True raise 'torch.compile with fullgraph=True found no "
        "compiled frames' although everything is compiled: another thread's call has set the "
        "counter that they share to 0. Eager flex_attention uses fullgraph=True internally."
    ),
    affects=">=2.12.0.dev0,<2.15.0.dev0",
    fixed_in="2.15",
    recognise=_recognise,
    edits=(Value(target=f"{_EVAL_FRAME}:{_NAME}", factory=FrameCount),),
    repro="repro/fullgraph_counter.py",
    links=(
        "https://github.com/pytorch/pytorch/pull/177809",
        "https://github.com/pytorch/pytorch/issues/185138",
    ),
    signs=(
        Sign(  # with reasons after it, "Skipped frames:", it is meant
            text=r"torch\.compile with fullgraph=True found no compiled frames\.(?! Skipped frames)"
        ),
    ),
)
