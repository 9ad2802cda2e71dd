"""compile_stance: a stance taken in one thread is taken in all.

`torch.compiler.set_stance` says whether compiled functions compile, run eagerly, or refuse to
recompile. It is one global of `torch._dynamo.eval_frame`: a `with set_stance("force_eager")` block
in one thread makes the compiled functions of every other thread run eagerly, silently, and blocks
that overlap leave the wrong stance behind. `skip_guard_eval_unsafe` goes further: it reaches the C
evaluator through a flag that, up to torch 2.14, all threads share, so that another thread's call
returns what was compiled for other inputs.

torch documents a function and a context manager and says nothing of threads. Here a block, and a
decorated function, holds in its own thread; a plain call is the stance of all threads that are not
in a block of their own.

The global's storage becomes one with both: an attribute of a `threading.local` over a shared
default. A plain call and the beginning of a `with` are the same call to torch; they are told apart
by what becomes of the object: entered, it never was for others; let go, it is the default.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torchcompat.patch import Patch, Value, Wrap
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign
from torchcompat.target import MISSING

from .c_flags import is_shared

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_SET_STANCE: Final = "torch._dynamo.decorators:set_stance"
#: On a `set_stance` object: the thread's stance before it, while it is not known what it will be.
_PRIOR: Final = "_torchcompat_prior"
_PRIORS: Final = "_torchcompat_priors"


class Stances(threading.local):
    """`value` is the thread's own stance, else the default of all, which is the class's."""

    value: Any = None
    scoped = False
    """Whether this thread sets its own stance at the moment."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value" and not self.scoped and "value" not in self.__dict__:
            type(self).value = value
        else:
            super().__setattr__(name, value)

    @contextmanager
    def own(self) -> Iterator[None]:
        """What torch sets inside is this thread's own."""
        self.scoped = True
        try:
            yield
        finally:
            self.scoped = False

    def current(self) -> Any:
        """The thread's own stance, or MISSING."""
        return self.__dict__.get("value", MISSING)

    def back_to(self, prior: Any) -> None:
        if prior is MISSING:
            self.__dict__.pop("value", None)
        else:
            self.__dict__["value"] = prior


_stances: Stances


def _make(current: object) -> Stances:
    global _stances
    cls: type[Stances] = type("Stances", (Stances,), {"value": current})
    _stances = cls()
    return _stances


def _skipping_is_safe() -> bool:
    """Whether skipped guards stay with the thread that asks for them."""
    eval_frame = sys.modules[_EVAL_FRAME]
    setter = getattr(eval_frame, "set_skip_guard_eval_unsafe", None)
    return threading.active_count() == 1 or not (setter and is_shared(setter, False, True))


def _init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        prior = _stances.current()
        with _stances.own():
            original(self, *args, **kwargs)
        setattr(self, _PRIOR, prior)
        if self.stance.skip_guard_eval_unsafe and not _skipping_is_safe():
            self.stance.skip_guard_eval_unsafe = False
            warnings.warn(
                "skip_guard_eval_unsafe is ignored: other threads are running, and this torch "
                "shares the setting among all, which would give them results compiled for other "
                "inputs (torchcompat, compile_stance)",
                stacklevel=2,
            )

    return __init__


def _enter(original: Any) -> Any:
    def __enter__(self: Any) -> Any:
        prior = self.__dict__.pop(_PRIOR, MISSING) if _PRIOR in vars(self) else _stances.current()
        self.__dict__.setdefault(_PRIORS, []).append(prior)
        try:
            with _stances.own():
                return original(self)
        except BaseException:
            _stances.back_to(vars(self)[_PRIORS].pop())
            raise

    return __enter__


def _exit(original: Any) -> Any:
    def __exit__(self: Any, *error: Any) -> Any:
        try:
            with _stances.own():
                return original(self, *error)
        finally:
            priors = vars(self).get(_PRIORS)
            if priors:
                _stances.back_to(priors.pop())

    return __exit__


def _call(original: Any) -> Any:
    def __call__(self: Any, function: Any) -> Any:
        prior = self.__dict__.pop(_PRIOR, _stances.current())
        try:
            with _stances.own():
                return original(self, function)
        finally:
            _stances.back_to(prior)

    return __call__


def _del(_: Any) -> Any:
    def __del__(self: Any) -> None:
        """Neither entered nor a decorator: it was a plain call."""
        if self.__dict__.get(_PRIOR, self) is not MISSING:
            return  # used otherwise, or called inside a block, where it holds until the block ends
        if _stances.current() is self.stance:
            _stances.back_to(MISSING)
        type(_stances).value = self.stance

    return __del__


PATCH = Patch(
    id="compile_stance",
    title="A stance taken in one thread's block must not hold in other threads",
    why=(
        "Inside `with torch.compiler.set_stance('force_eager')` of one thread every other thread's "
        "compiled functions run eagerly too, silently; blocks that overlap leave the wrong stance "
        "for good; with skip_guard_eval_unsafe other threads get results for other inputs."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocal(module=_EVAL_FRAME, name="_stance", holder=_make),
        Wrap(
            target=f"{_SET_STANCE}.__init__",
            factory=_init,
            anchors=("self.prev = _set_stance(self.stance)",),
        ),
        Wrap(
            target=f"{_SET_STANCE}.__enter__",
            factory=_enter,
            anchors=("_set_stance(self.stance)",),
        ),
        Wrap(target=f"{_SET_STANCE}.__exit__", factory=_exit, anchors=("_set_stance(self.prev)",)),
        Wrap(target=f"{_SET_STANCE}.__call__", factory=_call, anchors=("_set_stance(self.prev)",)),
        Value(target=f"{_SET_STANCE}.__del__", factory=_del, create=True),
    ),
    repro="repro/compile_stance.py",
    signs=(
        Sign(
            text="Detected recompile when torch.compile stance is 'fail_on_recompile'",
            in_thread=True,
            sure=False,  # the stance may be this thread's own
        ),
    ),
)
