"""isolate_recompiles: one thread's isolated region takes in what other threads compile.

`torch.compile(f, isolate_recompiles=True)` keeps the compiled entries of its calls apart. A call
tells the evaluator so through an id in C that, in 2.13 and 2.14, all threads share. While one
thread is in an isolated call, others' functions are looked up and filed under its id: they are
compiled again, count against its limit, and where that is reached run eager; overlapping calls
leave the id wrong. 2.15 keeps it per thread.

`torch._dynamo.eval_frame` sets the id through a global of its own, which becomes an object that
knows which thread is in a call of which id. The id in C is that of a region only while no thread is
in a call of another one; with company it is that of no region, and isolated calls say once that
they are not.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final

from torchcompat.patch import Patch, Value
from torchcompat.verdict import Finding

from .c_flags import is_shared

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_NAME: Final = "set_eval_frame_isolate_recompiles_id"
_NONE: Final = -1
#: Where a call keeps the id that it found, from its beginning on.
_FOUND: Final = "prior_isolate_recompiles_id"


class _Prior(int):
    """An id as it was before a call: tells the end of a call from the beginning of one."""


_OUTERMOST: Final = _Prior(_NONE)


class RegionId:
    """Stands for the C function: sets an id and returns the one before, of this thread."""

    def __init__(self, real: Callable[[int], int]) -> None:
        self._real = real
        self._lock = threading.Lock()
        self._inside: dict[int, int] = {}
        """Thread -> the id of the innermost call that it is in."""
        self._regions = True
        """Whether a thread may be in a region; set before looking who else is inside."""
        self._warned = False
        self._unsure = set(sys._current_frames())
        """Threads that may be in calls that began before this object was here."""

    def __call__(self, value: int) -> int:
        me = threading.get_ident()
        if me in self._unsure and not isinstance(value, _Prior) and self._ends_older_call(me):
            self._settle(_NONE)
            return value
        before = self._inside.get(me)
        if value is _OUTERMOST:
            self._inside.pop(me, None)
        else:
            self._inside[me] = int(value)
        # Without regions no lock: whoever enters one sees this thread, or this thread sees that.
        if value != _NONE or self._regions:
            self._settle(int(value))
        return _OUTERMOST if before is None else _Prior(before)

    def _ends_older_call(self, me: int) -> bool:
        """Whether the call at hand began before; told by its own frame, once for each thread."""
        call = sys._getframe(2)
        outer = call.f_back
        while outer is not None and outer.f_code.co_name != call.f_code.co_name:
            outer = outer.f_back
        if outer is None:
            self._unsure.discard(me)
        return _FOUND in call.f_locals

    def _settle(self, wanted: int) -> None:
        """Tell C the id that all threads inside agree on, and the user if it is not `wanted`."""
        with self._lock:
            self._regions = True
            ids = set(self._inside.values())
            if len(ids) > 1:  # without those who never came back, because their thread has ended
                alive = sys._current_frames()
                for thread in [t for t in list(self._inside) if t not in alive]:
                    self._inside.pop(thread, None)
                ids = set(self._inside.values())
            common = ids.pop() if len(ids) == 1 else _NONE
            self._real(common)
            self._regions = common != _NONE or bool(ids)
            tell = wanted not in (common, _NONE) and not self._warned
            self._warned |= tell
        if tell:
            warnings.warn(
                "isolate_recompiles=True has no effect while another thread is in a compiled "
                "call: this torch has one region for all threads, so that their functions would "
                "be compiled into it (torchcompat, isolate_recompiles)",
                stacklevel=4,
            )


def _recognise() -> Finding:
    """Whether the id is one for all threads, asked of the C function itself."""
    real: Any = vars(sys.modules[_EVAL_FRAME]).get(_NAME)
    if isinstance(real, RegionId):
        return Finding("ok", "the region of compiled entries is one for all threads")
    if not callable(real):
        return Finding("missing", f"{_EVAL_FRAME}:{_NAME} is not in this torch")
    if is_shared(real, _NONE, 3):
        return Finding("ok", "the region of compiled entries is one for all threads")
    return Finding("fixed", "the region of compiled entries is per thread here")


PATCH = Patch(
    id="isolate_recompiles",
    title="An isolated region must not take in what other threads compile",
    why=(
        "While one thread is in a call compiled with isolate_recompiles=True, the functions of all "
        "others are looked up and filed under its region: they are compiled again, use up its "
        "limit, and run eager once it is reached."
    ),
    affects=">=2.13.0.dev0,<2.15.0.dev0",
    fixed_in="2.15",
    recognise=_recognise,
    edits=(Value(target=f"{_EVAL_FRAME}:{_NAME}", factory=RegionId),),
    repro="repro/isolate_recompiles.py",
    links=("https://github.com/pytorch/pytorch/pull/196637",),
)
