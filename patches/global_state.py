"""global_state: the end of one thread's compile undoes what other threads did meanwhile.

Dynamo notes the process-wide state when a compile begins and puts it back when it ends, so that the
compile leaves no trace: torch's random generators (and Python's, up to 2.9), deterministic
algorithms, default dtype. What other threads did in between is undone with it, silently: the random
numbers that they drew are drawn again, their `use_deterministic_algorithms(True)` is off, their
default dtype is back. Every torch to date.

`preserve_global_state` gets code that asks before it puts anything back. A setting that another
thread has assigned since the beginning stays, and the compile begins anew under it; the two
functions that assign them note who did. A generator is put back if this is the only thread, and
otherwise left where it is: who has drawn from it cannot be known, and to hand out numbers twice is
worse than to skip some.

AOTAutograd and Inductor do the same with the generators, by `preserve_rng_state`; it asks as well.

A setting may also change after that question and before the finished guards are tried, which torch
takes for a fault of its own ("Guard failed on the same frame it was created"). That compile begins
anew as well.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat.errors import SourceDrift
from torchcompat.install import CodeSlot, Slot
from torchcompat.patch import Code, Edit, Patch, Wrap
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
_UTILS: Final = "torch._dynamo.utils"
_BEGAN: Final = "_torchcompat_began"
#: What the two functions call at the end -> the method that decides.
_RESTORES: Final = {
    "torch.random.set_rng_state": "cpu",
    "torch.cuda.set_rng_state": "cuda",
    "torch.xpu.set_rng_state": "xpu",
    "random.setstate": "python",
    "torch.use_deterministic_algorithms": "deterministic",
    "torch.set_default_dtype": "dtype",
    "guards.check": "check",
}
#: The settings that guards are made from, and so the reasons for a compile to begin anew.
_GUARDED: Final = ("deterministic", "dtype")
#: From 2.10 on, and before.
_AT_ONCE: Final = ("Guard failed on the same frame it was created", "Guard check failed: ")
#: Each takes a new assignment of another thread; who never stops assigning gets the error.
_BEGINNINGS: Final = 8
_REQUIRED: Final = {"cpu", "cuda", "deterministic", "check"}


class GlobalState:
    """Who assigned which setting when, and what may be put back."""

    def __init__(self) -> None:
        self._serial = 0
        self._last: dict[str, tuple[int, int]] = {}
        self._restoring = threading.local()

    def note(self, setting: str) -> None:
        """This thread assigns `setting` now, unless it puts it back."""
        if getattr(self._restoring, "setting", None) == setting:
            return  # it would hide who has assigned it before
        self._serial += 1
        self._last[setting] = (self._serial, threading.get_ident())

    def begin(self) -> int:
        return self._serial

    def _by_others(self, setting: str, began: int) -> bool:
        serial, thread = self._last.get(setting, (0, 0))
        return serial > began and thread != threading.get_ident()

    @contextmanager
    def _unnoted(self, setting: str) -> Iterator[None]:
        self._restoring.setting = setting
        try:
            yield
        finally:
            self._restoring.setting = None

    def moved(self, began: int) -> bool:
        """Whether another thread has assigned a setting since that guards are made from."""
        return any(self._by_others(setting, began) for setting in _GUARDED)

    def deterministic(self, began: int, mode: bool, warn_only: bool = False) -> None:
        if not self._by_others("deterministic", began):
            with self._unnoted("deterministic"):
                _torch().use_deterministic_algorithms(mode, warn_only=warn_only)

    def dtype(self, began: int, dtype: Any) -> None:
        if not self._by_others("dtype", began):
            with self._unnoted("dtype"):
                _torch().set_default_dtype(dtype)

    def check(self, began: int, guards: Any) -> bool:
        """Whether the compile left the state alone; where others changed it, begin anew.

        What was traced is for settings that do not hold any more: its guards would fail at once.
        """
        if not self.moved(began):
            return bool(guards.check())
        if sys.exc_info()[0] is None:  # else the compile has failed for a reason of its own
            exc: Any = sys.modules["torch._dynamo.exc"]
            convert_frame: Any = sys.modules[_CONVERT_FRAME]
            convert_frame.initial_global_state = type(guards)()  # what the guards are made from
            raise exc.RestartAnalysis(
                restart_reason="another thread changed the process-wide settings"
            )
        return True

    def cpu(self, began: int, state: Any) -> None:
        if threading.active_count() == 1:
            _torch().random.set_rng_state(state)

    def cuda(self, began: int, state: Any) -> None:
        if threading.active_count() == 1:
            _torch().cuda.set_rng_state(state)

    def xpu(self, began: int, state: Any) -> None:
        if threading.active_count() == 1:
            _torch().xpu.set_rng_state(state)

    def python(self, began: int, state: Any) -> None:
        if threading.active_count() == 1:
            sys.modules["random"].setstate(state)


class _Evaluator(threading.local):
    """What the evaluator in C++ does with Python's generator around a compile, from 2.10 on: it
    calls `random.getstate`, compiles, and at once puts that very state back."""

    taken: Any = None
    """What `getstate` has given last in this thread."""
    before: Any = None
    """The same, when the compile began; None unless it has just ended."""


_state: Final = GlobalState()
_evaluator: Final = _Evaluator()


def _getstate(original: Any) -> Any:
    def getstate() -> Any:
        _evaluator.before = None
        _evaluator.taken = original()
        return _evaluator.taken

    return getstate


def _compiling(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = _evaluator.taken
        try:
            for _ in range(_BEGINNINGS - 1):
                began = _state.begin()
                try:
                    return original(self, *args, **kwargs)
                except AssertionError as e:
                    if not str(e).startswith(_AT_ONCE) or not _state.moved(began):
                        raise
            return original(self, *args, **kwargs)
        finally:
            _evaluator.taken = None
            _evaluator.before = taken

    return __call__


def _setstate(original: Any) -> Any:
    def setstate(state: Any) -> None:
        """By the evaluator only where this is the only thread; by anybody else as ever."""
        by_evaluator = state is not None and state is _evaluator.before
        _evaluator.before = None
        if not by_evaluator or threading.active_count() == 1:
            original(state)

    return setstate


def _torch() -> Any:
    return sys.modules["torch"]


class _Asking(ast.NodeTransformer):
    """`restore(x)` -> `state.method(began, x)`, and a note of the beginning in `_fn`."""

    def __init__(self, began: ast.expr) -> None:
        self._began = began
        self.found: set[str] = set()

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = _RESTORES.get(ast.unparse(node.func))
        if method is None:
            return node
        self.found.add(method)
        holder = ast.Attribute(ast.Constant(PLACEHOLDER), method, ast.Load())
        arguments: list[ast.expr] = [self._began]
        arguments += [ast.Name("guards", ast.Load())] if method == "check" else node.args
        return ast.copy_location(ast.Call(holder, arguments, node.keywords), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name == "_fn":
            begin = ast.parse(f"{_BEGAN} = {PLACEHOLDER!r}.begin()").body[0]
            for inner in ast.walk(begin):
                if hasattr(inner, "lineno"):
                    ast.copy_location(inner, node.body[0])
            node.body.insert(0, begin)
        return node


def _function() -> FunctionType:
    function = vars(sys.modules[_CONVERT_FRAME]).get("preserve_global_state")
    if not isinstance(function, FunctionType):
        raise SourceDrift(f"{_CONVERT_FRAME}:preserve_global_state is no function")
    return function


def _new_code() -> CodeType:
    asking = _Asking(ast.Name(_BEGAN, ast.Load()))
    code = recompile(_function(), asking.visit)
    missing = _REQUIRED - asking.found
    if missing:
        raise SourceDrift(f"preserve_global_state does not restore {', '.join(sorted(missing))}")
    return embed(code, {PLACEHOLDER: _state})


def _inner(code: CodeType) -> CodeType:
    for const in code.co_consts:
        if isinstance(const, CodeType) and const.co_name == "_fn":
            return const
    raise SourceDrift("preserve_global_state has no inner function _fn")


class _Restore(Edit):
    """New code for `preserve_global_state`, and for what it has decorated already."""

    @property
    def modules(self) -> tuple[str, ...]:
        return (_CONVERT_FRAME,)

    def inspect(self) -> Finding:
        try:
            _inner(_new_code())
        except SourceDrift as e:
            return Finding("drifted", str(e))
        return Finding("ok", "the end of a compile puts the state of the process back unasked")

    def build(self) -> list[Slot]:
        function, new = _function(), _new_code()
        old_inner, new_inner = _inner(function.__code__), _inner(new)
        slots: list[Slot] = [CodeSlot(function, new)]
        for value in vars(sys.modules[_CONVERT_FRAME]).values():
            if isinstance(value, FunctionType) and value.__code__ is old_inner:
                slots.append(CodeSlot(value, new_inner))
        return slots


def _asking_for_generators(function: FunctionType) -> CodeType:
    asking = _Asking(ast.Constant(0))  # generators do not ask when it began
    code = recompile(function, asking.visit)
    if missing := {"cpu", "cuda"} - asking.found:
        raise SourceDrift(f"preserve_rng_state does not restore {', '.join(sorted(missing))}")
    return embed(code, {PLACEHOLDER: _state})


def _noting(setting: str) -> Any:
    def factory(function: FunctionType) -> CodeType:
        def insert(node: ast.FunctionDef) -> ast.FunctionDef:
            note = ast.parse(f"{PLACEHOLDER!r}.note({setting!r})").body[0]
            for inner in ast.walk(note):
                if hasattr(inner, "lineno"):
                    ast.copy_location(inner, node.body[0])
            # Before and after: a compile may begin or end between the note and the assignment.
            body = ast.Try(body=node.body, handlers=[], orelse=[], finalbody=[note])
            node.body = [note, ast.copy_location(body, node.body[0])]
            return node

        return embed(recompile(function, insert), {PLACEHOLDER: _state})

    return factory


PATCH = Patch(
    id="global_state",
    title="A compile must not undo what other threads did to the state of the process",
    why=(
        "When a compile ends, torch's random generators, deterministic mode and default dtype are "
        "put back to what they were when it began, also where other threads have drawn or assigned "
        "since: random numbers are handed out twice and settings are lost, silently."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        _Restore(),
        Code(
            target=f"{_UTILS}:preserve_rng_state",
            factory=_asking_for_generators,
            anchors=("torch.random.set_rng_state(rng_state)",),
        ),
        Code(target="torch:use_deterministic_algorithms", factory=_noting("deterministic")),
        Code(target="torch:set_default_dtype", factory=_noting("dtype")),
        Wrap(target=f"{_CONVERT_FRAME}:CatchErrorsWrapper.__call__", factory=_compiling),
        Wrap(target="random:getstate", factory=_getstate),
        Wrap(target="random:setstate", factory=_setstate),
    ),
    repro="repro/global_state.py",
    links=("https://github.com/pytorch/pytorch/issues/111569",),
    signs=(Sign(text=r"Global .*state changed while dynamo tracing, please report a bug"),),
)
