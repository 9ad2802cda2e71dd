"""What threads say of themselves while they compile or wait; `torchcompat.threads` shows it.

Patches write here around compiles and around waits, never on the way of a call that finds its code
compiled. There is no lock: every thread writes its own key only, and each value is a tuple that is
replaced, not changed. So a signal handler may read at any time.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

Kind = Literal[
    "wait_compile",
    "wait_backward",
    "wait_gate",
    "wait_calls",
    "wait_import",
    "backward",
    "compile",
    "export",
    "make_fx",
    "fx",
    "compiled_call",
    "other",
]


class Entry(NamedTuple):
    """`what`: a code object or a text. `since`: of `time.monotonic`. `holder`: the lock that is
    waited for, or the number of the thread that is."""

    kind: Kind
    what: Any
    since: float
    holder: Any = None


_stacks: dict[int, tuple[Entry, ...]] = {}


def entries() -> dict[int, tuple[Entry, ...]]:
    """By thread number, outermost first; a copy."""
    return dict(_stacks)


class Doing:
    """While inside, the thread is known to do `kind` with `what`."""

    __slots__ = ("_entry", "_ident")

    def __init__(self, kind: Kind, what: Any, holder: Any = None) -> None:
        self._entry = Entry(kind, what, 0.0, holder)
        self._ident = 0

    def __enter__(self) -> Doing:
        self._ident = threading.get_ident()
        self._entry = self._entry._replace(since=time.monotonic())
        _stacks[self._ident] = (*_stacks.get(self._ident, ()), self._entry)
        return self

    def now(self, kind: Kind) -> None:
        """From here on it does something else with the same thing: it has the lock, say."""
        entry = self._entry._replace(kind=kind, since=time.monotonic(), holder=None)
        stack = _stacks.get(self._ident, ())
        _stacks[self._ident] = tuple(entry if e is self._entry else e for e in stack)
        self._entry = entry

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = tuple(e for e in _stacks.get(self._ident, ()) if e is not self._entry)
        if left:
            _stacks[self._ident] = left
        else:
            _stacks.pop(self._ident, None)


def _forget_other_threads() -> None:
    """They do not exist in a forked child, where new threads get their numbers."""
    me: Final = threading.get_ident()
    for ident in [i for i in _stacks if i != me]:
        del _stacks[ident]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
