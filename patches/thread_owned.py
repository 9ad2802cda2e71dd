"""Hooks on a process-wide function that only the thread that set them runs into.

`torch.fx` sets `nn.Module.__call__` and `nn.Module.__getattr__` to functions bound to one tracer,
for the whole process, for as long as a trace runs. Here the two class attributes are never
touched. While at least one thread traces, the functions behind them carry code that asks which
hook the *current* thread has; when the last trace ends, they carry their own code again. Identity
never changes, so Dynamo's checks (`mod.__call__.__func__ is ...`) hold in every other thread, and
with no trace under way a module call costs what it always did.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torchcompat.rewrite import PLACEHOLDER, embed, recompile

Hook = Callable[..., Any]

_OWNER = PLACEHOLDER + "owner"


class _Pending(threading.local):
    """Per thread: active hooks, innermost last, and the calls on their way through a hook."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.calls: list[tuple[object, ...] | None] = []


class ThreadOwnedFunction:
    """One hooked function. `of()` gives the same object for the same function, always.

    The hooked code is the function's own with a prologue. It holds this object as a constant, so
    that a trace still running when the patch is taken away ends as it began.
    """

    _known: ClassVar[dict[FunctionType, ThreadOwnedFunction]] = {}

    def __init__(self, function: FunctionType, key_args: int) -> None:
        self.function = function
        self.key_args = key_args  # how many leading arguments identify a call on its way
        self.original = _clone(function)
        self.hooked_code = _with_prologue(function, self)
        self._pending = _Pending()
        self._lock = threading.Lock()
        self._users = 0

    @classmethod
    def of(cls, function: FunctionType, key_args: int) -> ThreadOwnedFunction:
        """Raises `SourceDrift` where the function's source does not take the prologue."""
        known = cls._known.get(function)
        return known or cls._known.setdefault(function, cls(function, key_args))

    def add(self, hook: Hook) -> list[Hook]:
        """Make `hook` the current thread's innermost one; `remove` wants what this returns."""
        hooks = self._pending.hooks
        hooks.append(hook)
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.function.__code__ = self.hooked_code
        return hooks

    def remove(self, hooks: list[Hook], hook: Hook) -> None:
        """Take `hook` away from the thread that added it, innermost or not, from any thread."""
        with self._lock:
            for i in range(len(hooks) - 1, -1, -1):
                if hooks[i] is hook:
                    del hooks[i]
                    self._users -= 1
                    break
            if self._users == 0 and self.function.__code__ is self.hooked_code:
                self.function.__code__ = self.original.__code__

    def route(self) -> Hook | None:
        """What the current thread's call goes to: None for the function itself."""
        return self._through_hook if self._pending.hooks else None

    def _through_hook(self, *args: Any, **kwargs: Any) -> Any:
        # The hook calls the function it stands for by torch's own name for it, which is this very
        # function: the first call with the same object from inside the hook is that one.
        calls = self._pending.calls
        key = args[: self.key_args]
        if calls and calls[-1] is not None and _same(calls[-1], key):
            calls[-1] = None
            return self.original(*args, **kwargs)
        depth = len(calls)
        calls.append(key)
        try:
            return self._pending.hooks[-1](*args, **kwargs)
        finally:
            del calls[depth:]


def _same(a: tuple[object, ...], b: tuple[object, ...]) -> bool:
    return a[0] is b[0] and a[1:] == b[1:]


def _with_prologue(function: FunctionType, owner: ThreadOwnedFunction) -> CodeType:
    """`function`'s code, first asking `owner` for the current thread's hook.

    Dynamo folds the first test, so a thread that compiles meanwhile sees the function's own body.
    """

    def insert(node: ast.FunctionDef) -> ast.FunctionDef:
        names = [a.arg for a in node.args.args]
        names += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
        names += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
        prologue = ast.parse(
            "if not torch.compiler.is_dynamo_compiling():\n"
            f"    _hook = {_OWNER!r}.route()\n"
            "    if _hook is not None:\n"
            f"        return _hook({', '.join(names)})\n"
        ).body
        for part in prologue:
            for inner in ast.walk(part):
                ast.copy_location(inner, node.body[0]) if hasattr(inner, "lineno") else None
        node.body[:0] = prologue
        return node

    return embed(recompile(function, insert), {_OWNER: owner})


def _clone(function: FunctionType) -> FunctionType:
    clone = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
