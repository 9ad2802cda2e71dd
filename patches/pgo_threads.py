"""pgo_threads: each thread has one shape, and Dynamo takes the difference for a dynamic one.

When a function is compiled for a second size of an input, Dynamo makes that dimension dynamic: what
it has seen is in one table for the process (`torch._dynamo.pgo`), by file, line and name. With a
thread per device or per bucket, each with one size for ever, the second thread's compile becomes
dynamic although nothing varies in any thread: slower kernels, and other numerics than one thread
would get, depending on who came first. Silent.

What a thread has seen counts for itself. Only when many threads (more than four) have brought sizes
of their own does the shared table learn them, and the dimension becomes dynamic as in one thread:
threads that come and go, one per request, must not compile a size each.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from typing import Any, Final

from torchcompat.patch import Patch, Wrap

_PGO: Final = "torch._dynamo.pgo"
#: Half of the recompile limit: after that many threads with a size each it is the sizes that vary.
_THREADS: Final = 4


class _Thread(threading.local):
    """A number for each thread, since the idents of threads that have ended come again."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)


_thread: Final = _Thread()


def _is_static(entry: Any) -> bool:
    """Whether all that the entry has seen is one number, or tensors of one size."""
    if not isinstance(entry.size, tuple):
        return type(entry.scalar) is int
    # A stride may be inferred from the size of its neighbour, which is no variation.
    auto_dynamic = sys.modules[_PGO].auto_dynamic
    strides = entry.stride if isinstance(entry.stride, tuple) else ()
    return all(type(n) is int for n in entry.size) and auto_dynamic not in strides


class _Sightings:
    """Which thread has seen what, for one input of one function."""

    def __init__(self) -> None:
        self.own: dict[int, Any] = {}
        """Thread -> its own entry, or None for the thread whose entry the shared table has."""

    def of_this_thread(self, shared: Any, is_new: bool) -> Any:
        """The entry to merge a new sight into, or None for the shared one."""
        me = _thread.number
        if me not in self.own:
            if not self.own or is_new or len(self.own) >= _THREADS or not _is_static(shared):
                for entry in filter(None, self.own.values()):
                    shared |= entry
                self.own = dict.fromkeys([*self.own, me])
            else:
                self.own[me] = type(shared)()
        return self.own[me]


def _update(original: Any) -> Any:
    #: The process's table -> sightings; reset() and a loaded profile make a new table.
    known: dict[str, Any] = {"table": None, "sightings": {}}
    lock = threading.Lock()

    def update_automatic_dynamic(tx: Any, name: str, entry: Any, **kwargs: Any) -> Any:
        pgo: Any = sys.modules[_PGO]
        state = pgo.get_code_state()
        code_id = _code_id(pgo, tx)
        with lock:
            if known["table"] is not state:
                known.update(table=state, sightings={})
            seen = state[code_id].automatic_dynamic
            key = (code_id, name)
            sightings = known["sightings"].setdefault(key, _Sightings())
            is_new = name not in seen
            mine = sightings.of_this_thread(seen[name], is_new)
            if mine is None:
                return original(tx, name, entry, **kwargs)
            shared, seen[name] = seen[name], mine
            try:
                result = original(tx, name, entry, **kwargs)
                sightings.own[_thread.number] = seen[name]
                return copy.copy(result)
            finally:
                seen[name] = shared

    return update_automatic_dynamic


def _code_id(pgo: Any, tx: Any) -> Any:
    """As torch makes it: from 2.12 with the function's closure."""
    if "closure" in pgo.CodeId.make.__code__.co_varnames:
        return pgo.CodeId.make(tx.f_code, tx.closure)
    return pgo.CodeId.make(tx.f_code)


PATCH = Patch(
    id="pgo_threads",
    title="A size that another thread has must not make this thread's dynamic",
    why=(
        "Threads that each call one function with one size of their own, as one per device or per "
        "bucket do, make each other's graphs dynamic: slower, other numerics, dependent on who "
        "came first, silently."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target=f"{_PGO}:update_automatic_dynamic",
            factory=_update,
            signature=("tx", "name", "entry", "is_unspecialized_nn_module"),
            anchors=("CodeId.make(tx.f_code", "mut_entry |= entry"),
        ),
    ),
    repro="repro/pgo_threads.py",
)
