"""config_patch_leak: up to torch 2.11 `config.patch()` of one thread changes the compiles of all.

The settings of `torch._dynamo.config`, `torch._inductor.config` and their like are one value for
the process. `config.patch()`, and `torch.compile(dynamic=…)` around every call, assign a value and
assign the earlier one again: other threads compile with it meanwhile, silently, and two blocks that
overlap leave a wrong value for good. A decorator of `config.patch()` in two threads at once raises
`AssertionError`. From 2.12 on settings are context variables (patch config_inherit).

An assignment stays the value of all threads. What a block sets is its context's own until it ends:
a mapping in one context variable, which the entries' attribute `user_override`, now a descriptor,
asks before the entry. A thread without a block pays one look at that variable. The autograd threads
that work for a `backward()` inside a block have its values, too, through the thread-local state
that the engine hands on. The hash, whose cache is for the process, is made anew.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat.patch import Code, Patch, Value, Wrap
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

from .own_settings import (
    Touched,
    closure_patcher,
    hash_anew,
    own_settings,
    restore_settings,
    touched_now,
)

_MODULE: Final = "torch.utils._config_module"
_KEY: Final = "torchcompat_settings"
_NOTHING: Final = object()

#: id of an entry -> the value that this context has of its own. Never changed in place: contexts
#: that were copied from this one keep theirs. Configuration modules, and so ids, are for ever.
_own: Final[ContextVar[Mapping[int, Any] | None]] = ContextVar("torchcompat_own", default=None)

#: The blocks of `config.patch()` that this context is in, innermost last.
_blocks: Final[ContextVar[tuple[tuple[Any, Touched], ...]]] = ContextVar(
    "torchcompat_blocks", default=()
)


def _set_own(key: int, value: Any) -> None:
    own = dict(_own.get() or {})
    if value is _NOTHING:
        own.pop(key, None)
    else:
        own[key] = value
    _own.set(own or None)


class _Lending:
    """Values of blocks, for the autograd threads that work for a `backward()` inside of them."""

    def __init__(self) -> None:
        self.under_way = 0
        self._lock = threading.Lock()

    @contextmanager
    def backward(self) -> Iterator[None]:
        own = _own.get()
        if not own:
            yield
            return
        before = self.lent()
        self._hand_on({**before, **own})
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._hand_on(before)

    @staticmethod
    def _hand_on(values: Mapping[int, Any]) -> None:
        """Up to 2.11 torch takes over a reference that it was not given."""
        torch_c: Any = sys.modules["torch._C"]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(values))
        torch_c._stash_obj_in_tls(_KEY, values)

    def _count(self, step: int) -> None:
        with self._lock:
            self.under_way += step

    def lent(self) -> Mapping[int, Any]:
        """What the thread that called backward() has of its own, where this thread works for it."""
        torch_c: Any = sys.modules["torch._C"]
        lent: Mapping[int, Any] = (
            torch_c._get_obj_in_tls(_KEY) if torch_c._is_key_in_tls(_KEY) else {}
        )
        return lent


_lending: Final = _Lending()


class Setting:
    """In the place of `_ConfigEntry.user_override`: this context's own value, else that of all
    threads, which stays where it was, in the entry."""

    def __init__(self, unset: Any) -> None:
        self._unset = unset

    def __get__(self, entry: Any, owner: Any = None) -> Any:
        if entry is None:
            return self._unset
        own = _own.get()
        if own is not None:
            value = own.get(id(entry), _NOTHING)
            if value is not _NOTHING:
                return value
        if _lending.under_way:
            value = _lending.lent().get(id(entry), _NOTHING)
            if value is not _NOTHING:
                return value
        return entry.__dict__.get("user_override", self._unset)

    def __set__(self, entry: Any, value: Any) -> None:
        key = id(entry)
        own = (_own.get() or {}).get(key, _NOTHING)
        touched = touched_now()
        if touched is not None:
            touched.setdefault(key, functools.partial(_set_own, key, own))
        elif own is _NOTHING:
            entry.__dict__["user_override"] = value
            return
        _set_own(key, value)  # or inside a patch of this very setting


def _patch(original: Any) -> Any:
    def patch(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = original(self, *args, **kwargs)
        manager.__class__ = _scoped(type(manager), self)
        return manager

    return patch


def _scoped(cls: Any, config: Any) -> type:
    """`cls`, a context manager of `config.patch()`, whose settings are its context's own. Torch's
    keeps the earlier values in one place for all threads that are inside."""

    class ConfigPatch(cls):  # type: ignore[misc]
        def __enter__(self) -> None:
            touched: Touched = {}
            for name in self.changes:
                config.__getattr__(name)  # raises for one that there is not
            try:
                with own_settings(touched):
                    for name, value in self.changes.items():
                        config.__setattr__(name, value)
            except BaseException:
                restore_settings(touched)
                raise
            _blocks.set((*_blocks.get(), (self, touched)))

        def __exit__(self, *error: Any) -> None:
            blocks = _blocks.get()
            for i in range(len(blocks) - 1, -1, -1):
                if blocks[i][0] is self:
                    _blocks.set(blocks[:i] + blocks[i + 1 :])
                    restore_settings(blocks[i][1])
                    return

    return ConfigPatch


def _lends(function: FunctionType) -> CodeType:
    """`function`'s code, inside of `_lending.backward()`. By its code, since `torch.autograd` has
    imported it by name."""

    def change(node: ast.FunctionDef) -> ast.FunctionDef:
        block = ast.parse(f"with {PLACEHOLDER!r}.backward():\n    pass").body[0]
        assert isinstance(block, ast.With)
        for inner in ast.walk(block):
            if hasattr(inner, "lineno"):
                ast.copy_location(inner, node.body[0])
        block.body, node.body = node.body, [block]
        return node

    return embed(recompile(function, change), {PLACEHOLDER: _lending})


def _is_shared() -> Finding:
    entry = getattr(sys.modules[_MODULE], "_ConfigEntry", None)
    if entry is None:
        return Finding("missing", f"{_MODULE}:_ConfigEntry is not in this torch")
    if "ContextVar" in str(entry.__annotations__.get("user_override", "")):
        return Finding("fixed", "a patch of settings is its context's own in this torch")
    return Finding("ok", "settings have one value for the process, and patches change it")


PATCH = Patch(
    id="config_patch_leak",
    title="config.patch() of one thread must not change the settings of the others",
    why=(
        "Up to torch 2.11 config.patch(), torch.compile(options=…) and torch.compile(dynamic=…) "
        "change settings of the whole process: other threads compile with them, silently, and "
        "blocks that overlap leave a wrong value for good."
    ),
    affects=">=2.6.0.dev0,<2.12.0.dev0",
    fixed_in="2.12",
    recognise=_is_shared,
    edits=(
        Value(target=f"{_MODULE}:_ConfigEntry.user_override", factory=Setting),
        Wrap(
            target=f"{_MODULE}:ConfigModule.patch",
            factory=_patch,
            signature=("self", "arg1", "arg2", "kwargs"),
            anchors=("prior[key] = config.__getattr__(key)", "config.__setattr__(k, v)"),
        ),
        Wrap(
            target=f"{_MODULE}:ConfigModule._make_closure_patcher",
            factory=closure_patcher,
            signature=("self", "changes"),
            anchors=("prior = {k: config[k].user_override for k in changes}",),
        ),
        Wrap(
            target=f"{_MODULE}:ConfigModule.get_hash",
            factory=hash_anew,
            signature=("self",),
            anchors=("if self._is_dirty or self._hash_digest is None",),
        ),
        Code(
            target="torch.autograd.graph:_engine_run_backward",
            factory=_lends,
            signature=("t_outputs", "args", "kwargs"),
            anchors=("Variable._execution_engine.run_backward(",),
        ),
    ),
    repro="repro/config_patch_leak.py",
    links=("https://github.com/pytorch/pytorch/issues/118387",),
    signs=(
        Sign(  # up to 2.9 the error has no text
            text=r"^AssertionError(?:: prior should be empty when entering ConfigPatch)?$",
            raised_in="torch/utils/_config_module.py:__enter__",
        ),
    ),
)
