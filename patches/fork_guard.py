"""fork_guard: a forked child waits for ever for a compile that stayed behind in the parent.

A fork copies locks as they are, but only the thread that forks. A DataLoader worker that is forked
while another thread compiles has a compile lock that nobody will release: its first compiled call
hangs, in every torch to date, silently.

After a fork, in the child, the compile lock is made new if another thread had it. So are the locks
that modules of torch's compiler stack and of these patches keep as globals. What such a lock
guarded is as the fork found it; per-thread state of the compile has gone with its thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torchcompat.install import Slot, UndoState
from torchcompat.patch import Edit, Patch
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
_STACK: Final = (
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch.fx",
    "torchcompat.patches",
)
# typeshed leaves out what is asked of them here
_RLOCK: Final[Any] = type(threading.RLock())
_LOCK: Final[Any] = type(threading.Lock())

_state = {"registered": False, "on": False}


def _locks() -> Iterator[Any]:
    """Locks that are globals of the compiler stack's modules, each once."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_STACK):
            for value in list(getattr(module, "__dict__", {}).values()):
                if isinstance(value, (_RLOCK, _LOCK)) and id(value) not in seen:
                    seen.add(id(value))
                    yield value


def _in_the_child() -> None:
    """Free what threads hold that are not here. Only the thread that forked is."""
    if not _state["on"]:
        return
    for lock in _locks():
        if isinstance(lock, _RLOCK):
            if not lock._is_owned():
                lock._at_fork_reinit()
        # A plain lock does not tell whose it is. The thread that forks has none: nothing in the
        # stack forks under one.
        elif lock.locked():
            lock._at_fork_reinit()


class _AfterFork(Slot):
    """The hook of the interpreter. It cannot be taken out, only switched off."""

    def set(self) -> None:
        if not _state["registered"]:
            os.register_at_fork(after_in_child=_in_the_child)
            _state["registered"] = True
        _state["on"] = True

    def undo(self) -> UndoState:
        _state["on"] = False
        return "restored"

    def current_is_ours(self) -> bool:
        return _state["on"]

    def describe(self) -> str:
        return "os.register_at_fork"


@dataclass(frozen=True)
class _FreshLocksInChildren(Edit):
    @property
    def modules(self) -> tuple[str, ...]:
        return (_CONVERT_FRAME,)

    def inspect(self) -> Finding:
        if not hasattr(os, "register_at_fork"):
            return Finding("fixed", "this system does not fork")
        lock = getattr(sys.modules[_CONVERT_FRAME], "compile_lock", None)
        if not isinstance(lock, _RLOCK) or not hasattr(lock, "_at_fork_reinit"):
            return Finding("drifted", f"the compile lock is {type(lock).__name__}, not an RLock")
        return Finding("ok", "a forked child keeps the compile lock of a thread it does not have")

    def build(self) -> list[Slot]:
        return [_AfterFork()]


PATCH = Patch(
    id="fork_guard",
    title="A process forked while another thread compiles must be able to compile",
    why=(
        "A DataLoader or multiprocessing worker that is forked while another thread compiles has "
        "a copy of the compile lock that nobody releases: its first compiled call hangs for ever, "
        "silently."
    ),
    affects=">=2.6.0.dev0",
    edits=(_FreshLocksInChildren(),),
    repro="repro/fork_guard.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/108586",
        "https://github.com/pytorch/pytorch/issues/121197",
    ),
    signs=(
        Sign(
            text="",
            kind="dump",
            raised_in="torch/_dynamo/convert_frame.py:__call__",
            frames=("multiprocessing/popen_fork.py:_launch",),
        ),
    ),
)
