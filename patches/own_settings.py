"""What the patches of torch's configuration share: settings that are assigned inside a block, and
are the block's own, although an assignment elsewhere is for all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

#: What a block has touched -> puts the block's context back to what it had of its own before.
Touched = dict[Hashable, Callable[[], object]]


class _Recording(threading.local):
    """While a block begins or ends in this thread: what it touches."""

    touched: Touched | None = None


_recording: Final = _Recording()


def touched_now() -> Touched | None:
    """Where a setting that is assigned now notes how it was; None outside of `own_settings`."""
    return _recording.touched


@contextmanager
def own_settings(touched: Touched) -> Iterator[None]:
    """What is set inside is this context's own; how it was goes into `touched`."""
    before = _recording.touched
    _recording.touched = touched
    try:
        yield
    finally:
        _recording.touched = before


def restore_settings(touched: Touched) -> None:
    """The end of a block: this context has what it had before."""
    for back in touched.values():
        back()


def closure_patcher(original: Any) -> Any:
    """`ConfigModule._make_closure_patcher` whose changes are their context's own."""

    def _make_closure_patcher(self: Any, **changes: Any) -> Any:
        change = original(self, **changes)

        def own_change() -> Callable[[], None]:
            touched: Touched = {}
            with own_settings(touched):
                revert = change()

            def own_revert() -> None:
                with own_settings({}):
                    revert()
                restore_settings(touched)

            return own_revert

        return own_change

    return _make_closure_patcher


def hash_anew(original: Any) -> Any:
    """`ConfigModule.get_hash` where one cache serves threads whose values differ."""
    lock = threading.Lock()

    def get_hash(self: Any) -> Any:
        if "_is_dirty" not in vars(self):
            return original(self)
        with lock:
            self._is_dirty = True
            try:
                return original(self)
            finally:
                self._is_dirty = True  # once the patch is taken away, too

    return get_hash
