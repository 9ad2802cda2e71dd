"""What is said where a function has as many compiled versions as it may.

torch writes a line into its log, which is easily missed, and runs the function uncompiled from then
on. `recompile_budget` calls this module round the question whether the limit is reached, so that
the user gets one warning that says what to do, or an error where the settings ask for one.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Final

from torchcompat.config import in_force
from torchcompat.errors import RecompileLimitWarning

_CONFIG: Final = "torch._dynamo.config"
# In this torch, and in 2.6.
_FAIL: Final = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")


class _Compile(threading.local):
    """The compile that the thread is in."""

    code: CodeType | None = None
    owner: Any = None
    reason: str | None = None


_compile = _Compile()
_told: dict[tuple[int, int], weakref.ref[CodeType]] = {}


@contextmanager
def compiling(code: CodeType | None, owner: Any) -> Iterator[None]:
    """While inside, the thread compiles `code` for the module `owner`, if it is one's."""
    outer = _compile.code, _compile.owner, _compile.reason
    _compile.code, _compile.owner, _compile.reason = code, owner, None
    try:
        yield
    finally:
        _compile.code, _compile.owner, _compile.reason = outer


def keep_last_reason(original: Any) -> Any:
    """A wrapper of the function that finds out why no compiled version fitted the call. 2.6 has the
    version used last at the end of its list, later torch at the beginning."""
    last = 0 if original.__name__.endswith("reasons") else -1

    def why(*args: Any, **kwargs: Any) -> Any:
        reasons = original(*args, **kwargs)
        _compile.reason = str(reasons[last]).strip() if reasons else None
        return reasons

    return why


def tell_when_exceeded(original: Any) -> Any:
    """A wrapper of the function that decides whether the limit is reached."""

    def exceeds_limit(cache_size: Any, compile_id: Any) -> Any:
        exceeded, limit = original(cache_size, compile_id)
        code = _compile.code
        config = sys.modules[_CONFIG]
        if exceeded and code is not None and not any(getattr(config, n, False) for n in _FAIL):
            limit_now = getattr(config, limit)
            # The sum over all users can also be of versions that are gone: torch counts compiles.
            count = (
                max(cache_size.num_cache_entries, compile_id.frame_compile_id or 0)
                if limit.startswith("accumulated")
                else cache_size.num_cache_entries_with_same_id_matched_objs
            )
            _tell(code, _message(code, limit, limit_now, count))
        return exceeded, limit

    return exceeds_limit


def _message(code: CodeType, limit: str, limit_now: int, count: int) -> str:
    owner = "" if _compile.owner is None else f" of a {type(_compile.owner).__qualname__}"
    where = f"{code.co_name!r}{owner} ({code.co_filename}:{code.co_firstlineno})"
    if limit.startswith("accumulated"):
        what = "was compiled that often, over all modules, devices, modes and threads"
    else:
        what = "has that many compiled versions for one module, device, mode and thread"
    reason = "not known" if _compile.reason is None else _compile.reason
    return (
        f"torch compiles no more versions of {where}: {count} are there, and {_CONFIG}.{limit} is "
        f"{limit_now}. It {what}. From now on calls that need another version run uncompiled, "
        "whoever makes them, or raise under fullgraph=True.\n"
        f"Last guard that failed: {reason}\n"
        "Ways out: pad inputs to fewer shapes; torch.compile(dynamic=True) or "
        "torch._dynamo.mark_dynamic where sizes vary; arguments that are tensors where numbers "
        f"vary; or a higher {_CONFIG}.{limit}, set before the first compile. "
        "TORCHCOMPAT_ON_RECOMPILE_LIMIT=error makes this an error."
    )


def _tell(code: CodeType, message: str) -> None:
    if in_force().on_recompile_limit == "error":
        raise sys.modules["torch._dynamo.exc"].FailOnRecompileLimitHit(message)
    # By identity: code objects that are alike are equal. Threads that waited come here as well.
    key = (id(code), id(_compile.owner))
    if key in _told:
        return
    _told[key] = weakref.ref(code, lambda _: _told.pop(key, None) and None)
    warnings.warn_explicit(
        message, RecompileLimitWarning, code.co_filename, max(code.co_firstlineno, 1)
    )
