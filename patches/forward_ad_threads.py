"""forward_ad_threads: forward-mode derivatives of two threads share one level.

Forward-mode AD has one level for the process, in C++ and in `JVP_NESTING` of
`torch._functorch.eager_transforms`, in every torch to date. A `torch.func.jvp` that begins while
another thread is in one takes itself for nested in that, and uses its level; when the other one
ends first, the level goes, and the tangents that come out are zeros, silently.

It cannot be mended from Python: the second level that it takes does not exist in C++. A `jvp` (and
`jacfwd`, `linearize`, `hessian`) that begins while another thread is in one is refused with an
error. `forward_ad.dual_level` refuses that itself.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from torchcompat.patch import Patch, Wrap
from torchcompat.sign import Sign

_TRANSFORMS: Final = "torch._functorch.eager_transforms"


class _Mine(threading.local):
    refused = False


class _Nesting:
    """Which thread is inside jvp, and how deep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._depth = 0
        self._mine = _Mine()

    def enter(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._mine.refused = self._thread not in (None, me)
            if self._mine.refused:
                raise RuntimeError(
                    "torch.func.jvp began while another thread is inside one. Forward-mode AD has "
                    "one level for the whole process, so the tangents could silently come out as "
                    "zeros. Put one lock around the calls, or use reverse mode."
                )
            self._thread = me
            self._depth += 1

    def was_refused(self) -> bool:
        """Whether the exit that is asked for is that of a refused entry: torch's context manager
        exits what it could not enter."""
        refused, self._mine.refused = self._mine.refused, False
        return refused

    def exit(self) -> None:
        with self._lock:
            if self._depth and self._thread == threading.get_ident():
                self._depth -= 1
                if not self._depth:
                    self._thread = None


_nesting = _Nesting()


def _enter(original: Any) -> Any:
    def enter_jvp_nesting() -> int:
        _nesting.enter()
        try:
            level: int = original()
        except BaseException:
            _nesting.exit()
            raise
        return level

    return enter_jvp_nesting


def _exit(original: Any) -> Any:
    def exit_jvp_nesting() -> None:
        if _nesting.was_refused():
            return
        try:
            original()
        finally:
            _nesting.exit()

    return exit_jvp_nesting


PATCH = Patch(
    id="forward_ad_threads",
    title="Overlapping torch.func.jvp of two threads must not give zeros",
    why=(
        "Forward-mode AD has one level for the process. Of two torch.func.jvp calls that overlap "
        "in two threads, the second silently returns tangents of zero when the first ends before "
        "it does."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target=f"{_TRANSFORMS}:enter_jvp_nesting",
            factory=_enter,
            signature=(),
            anchors=("JVP_NESTING += 1",),
        ),
        Wrap(
            target=f"{_TRANSFORMS}:exit_jvp_nesting",
            factory=_exit,
            signature=(),
            anchors=("JVP_NESTING -= 1",),
        ),
    ),
    repro="repro/forward_ad_threads.py",
    signs=(
        Sign(
            text="Nested forward mode AD is not supported at the moment",
            in_thread=True,
        ),
        Sign(text="Nested forward mode AD is not supported at the moment", sure=False),
        Sign(
            text="Trying to access a forward AD level with an invalid index",
        ),
        Sign(text="Exiting a forward AD level that is not the last that was created"),
    ),
)
