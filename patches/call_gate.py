"""A gate before compiled calls that costs them nothing while it stands open.

Compiled calls are the readers, whoever takes compiled code away is the writer. Readers do not
count themselves in and out: the writer looks at every thread's stack for the wrapper that
`torch.compile` puts around a function. Only while a writer waits or works does a new call, in
`torch._dynamo.eval_frame._callback_from_stance`, come to stand before the gate.

The stacks of other threads are read by faulthandler, in one go with the interpreter stopped. To
walk them by `frame.f_back` is not safe: the thread runs on between two steps, and Dynamo's own
frames leave links to memory that is used again.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, NoReturn

from torchcompat.activity import Doing

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
_ENTRY: Final = "_callback_from_stance"
#: How long a writer waits for calls under way before it gives up.
TIMEOUT_S = 30.0

Place = tuple[str, int, str]
#: How faulthandler writes the head of a stack, and a frame of it.
_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'  File "(.*)", line \S+ in (.*)')
_CUT: Final = "  ..."


def _place(code: CodeType) -> Place:
    return code.co_filename, code.co_firstlineno, code.co_name


def threads_in(names: set[str]) -> list[int]:
    """The threads with a function of `torch._dynamo.eval_frame` called one of `names` on the stack.

    faulthandler cuts a stack of over a hundred frames, and leaves out threads beyond the hundredth;
    such a thread counts as being in one (as number 0, if it is not known).
    """
    file = str(sys.modules[_EVAL_FRAME].__file__).encode("ascii", "backslashreplace").decode()
    with tempfile.TemporaryFile("w+") as text:
        faulthandler.dump_traceback(text, all_threads=True)
        text.seek(0)
        lines = text.read().splitlines()
    found: dict[int, None] = {}
    ident = 0
    for line in lines:
        if head := _THREAD.match(line):
            ident = int(head[1], 16)
        elif line == "...":
            found[0] = None
        elif line == _CUT or ((f := _FRAME.match(line)) and f[1] == file and f[2] in names):
            found[ident] = None
    return list(found)


def wrapper_places(make_wrapper: CodeType) -> set[Place]:
    """Where the functions begin that `_TorchDynamoContext.__call__` wraps compiled functions in.

    Places, not code objects: a patch may have given `__call__` code of its own.
    """
    return {
        _place(const)
        for const in make_wrapper.co_consts
        if isinstance(const, CodeType) and _ENTRY in const.co_names
    }


def _calls_on(frame: FrameType | None, places: set[Place]) -> int:
    """How many compiled calls a stack is in."""
    count = 0
    while frame is not None:
        count += _place(frame.f_code) in places
        frame = frame.f_back
    return count


def _compiles(frame: FrameType | None) -> bool:
    """Whether a stack is in Dynamo's conversion of a frame."""
    file = sys.modules[_CONVERT_FRAME].__file__
    while frame is not None:
        if frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


class CallGate:
    """Open to everybody, or closed by one thread. `places` is where compiled calls can be seen."""

    def __init__(self, places: set[Place]) -> None:
        self._places = places
        self._changed = threading.Condition()
        self._closed_by: int | None = None
        self._purpose = ""
        self._depth = 0
        self._before_gate: set[int] = set()
        self._diverted: Callable[[], None] | None = None

    @contextmanager
    def closed(self, purpose: str) -> Iterator[None]:
        """While inside, no other thread is in a compiled call, and none begins one.

        Raises `RuntimeError` after `TIMEOUT_S` where calls do not end, and at once where the
        calling thread is inside a compile. A compiled call of the calling thread itself is no
        obstacle: there is nobody who could end it.
        """
        if _compiles(sys._getframe()):
            raise RuntimeError(
                f"{purpose} was called while this thread compiles: it would take away the code "
                "that the compile is for. Call it before or after the compiled call."
            )
        with Doing("wait_calls", purpose, self._closed_by):
            self._close(purpose, time.monotonic() + TIMEOUT_S)
        try:
            yield
        finally:
            self._open()

    def _close(self, purpose: str, deadline: float) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._closed_by == me:
                self._depth += 1
                return
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._closed_by is None, left):
                self._refuse(purpose, "another thread's reset does not end")
            self._closed_by, self._depth, self._purpose = me, 1, purpose
            self._divert()
        try:
            pause = 0.0002
            while inside := self._inside(me):
                if time.monotonic() > deadline:
                    names = {t.ident: t.name for t in threading.enumerate()}
                    shown = ", ".join(sorted(names.get(i) or f"thread {i}" for i in inside))
                    self._refuse(purpose, f"compiled calls are under way in: {shown}")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        except BaseException:
            self._open()
            raise

    def _refuse(self, purpose: str, why: str) -> NoReturn:
        raise RuntimeError(
            f"{purpose} waited {TIMEOUT_S:.0f} s and gave up, nothing was changed: {why}. "
            "It would free code that they run. Stop them first."
        )

    def _open(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._closed_by = None
                if self._diverted is not None:
                    self._diverted()
                self._changed.notify_all()

    def _inside(self, me: int) -> list[int]:
        """The other threads in a compiled call; one that stands before the gate is in none yet."""
        with self._changed:
            found = threads_in({name for _, _, name in self._places})
            return [ident for ident in found if ident != me and ident not in self._before_gate]

    def _divert(self) -> None:
        """Lead the beginning of every compiled call past `_pass` until the gate opens."""
        namespace = vars(sys.modules[_EVAL_FRAME])
        original = namespace[_ENTRY]

        def enter(callback: Any) -> Any:
            if callback is not None:  # None is a call of a disabled function
                self._pass()
            return original(callback)

        def back() -> None:
            if namespace[_ENTRY] is enter:
                namespace[_ENTRY] = original

        namespace[_ENTRY] = enter
        self._diverted = back

    def _pass(self) -> None:
        """Wait while another thread has the gate closed, unless that thread waits for this one."""
        me = threading.get_ident()
        # This call's own wrapper is one; a second is a call under way that must be able to end.
        if _calls_on(sys._getframe(), self._places) > 1:
            return
        if sys.modules[_CONVERT_FRAME].compile_lock._is_owned():  # others wait for that
            return
        with self._changed:
            while self._closed_by not in (None, me):
                self._before_gate.add(me)
                try:
                    with Doing("wait_gate", self._purpose, self._closed_by):
                        self._changed.wait()
                finally:
                    self._before_gate.discard(me)
