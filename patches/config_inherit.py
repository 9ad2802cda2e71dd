"""config_inherit: from torch 2.12 on a setting is seen only by the thread that assigns it.

The settings of `torch._dynamo.config`, `torch._inductor.config` and their like are context
variables since 2.12: what the main thread assigns, worker threads, executors and server threads do
not see; they compile with the defaults (recompile limit 8, no autotuning, …), silently. Before 2.12
there was one value for the process, and `config.patch()` of one thread changed the compiles of all.

Neither is what is meant. Here an assignment, in any thread, is the value of every thread that has
none of its own, and `config.patch()` gives its thread, and the contexts copied from it, values of
their own until it ends. Each entry's context variable is put behind an object with both layers; the
caches of hashes and dictionaries, which are per context, learn of assignments elsewhere by a
generation. In 2.12 those caches are shared while the values are not; there the hash is made anew.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import Any, Final

from torchcompat.install import AttrSlot, Slot, UndoState, finish_wrapper, patch_being_built
from torchcompat.patch import Edit, Patch
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
_NEEDED: Final = ("ConfigModule", "_ConfigEntry", "install_config_module", "_UNSET_SENTINEL")


class _Generation:
    """How often a value for all threads of one module was assigned."""

    def __init__(self) -> None:
        self.number = 0


class _Shared:
    """What `Override.set` returns for a value of all threads, for `Override.reset`."""

    def __init__(self, before: Any) -> None:
        self.before = before


class Override:
    """Stands for an entry's context variable: the context's own value, else that of all threads."""

    def __init__(self, variable: ContextVar[Any], generation: _Generation, unset: Any) -> None:
        self.variable = variable
        self.shared = variable.get()
        variable.set(unset)  # what was assigned before is for all
        self._generation = generation
        self._unset = unset

    def get(self) -> Any:
        own = self.variable.get()
        return self.shared if own is self._unset else own

    def set(self, value: Any) -> Any:
        own = self.variable.get()
        touched = touched_now()
        if touched is not None:
            touched.setdefault(self, functools.partial(self.variable.set, own))
            return self.variable.set(value)
        if own is not self._unset:  # inside a patch of this very setting
            return self.variable.set(value)
        token = _Shared(self.shared)
        self.shared = value
        self._generation.number += 1
        return token

    def reset(self, token: Any) -> None:
        if isinstance(token, _Shared):
            self.shared = token.before
            self._generation.number += 1
        else:
            self.variable.reset(token)

    def give_up(self) -> None:
        """The variable alone again: this context keeps what it saw."""
        self.variable.set(self.get())


class Stamped:
    """Stands for the context variable that says whether a cache is fresh: not where a value of all
    threads was assigned since. `fresh` is what is set once the cache is filled."""

    def __init__(self, variable: ContextVar[Any], generation: _Generation, stale: Any) -> None:
        self.variable = variable
        self._generation = generation
        self._stale = stale
        self._seen: ContextVar[int] = ContextVar("torchcompat_seen", default=-1)
        self._looked: ContextVar[int] = ContextVar("torchcompat_looked", default=-1)

    def get(self) -> Any:
        now = self._generation.number
        self._looked.set(now)  # what is computed from here on may not know what comes later
        return self.variable.get() if self._seen.get() == now else self._stale

    def set(self, value: Any) -> Any:
        if value is not self._stale:
            self._seen.set(self._looked.get())
        return self.variable.set(value)


def _patch(original: Any) -> Any:
    def patch(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = original(self, *args, **kwargs)
        manager.__class__ = _scoped(type(manager))
        manager._torchcompat_touched = ContextVar("torchcompat_touched", default=())
        return manager

    return patch


def _scoped(cls: Any) -> type:
    """`cls`, a context manager of `config.patch()`, whose settings are its context's own."""

    class ConfigPatch(cls):  # type: ignore[misc]
        def __enter__(self) -> Any:
            touched: Touched = {}
            try:
                with own_settings(touched):
                    result = super().__enter__()
            except BaseException:
                restore_settings(touched)
                raise
            self._torchcompat_touched.set((*self._torchcompat_touched.get(), touched))
            return result

        def __exit__(self, *error: Any) -> Any:
            stack = self._torchcompat_touched.get()
            self._torchcompat_touched.set(stack[:-1])
            try:
                with own_settings({}):
                    return super().__exit__(*error)
            finally:
                restore_settings(stack[-1] if stack else {})

    return ConfigPatch


class _Adoption(Slot):
    """All configuration modules that there are, and, through `adopt`, those to come."""

    def __init__(self) -> None:
        self._home = sys.modules[_MODULE]
        self._adopted: list[tuple[Any, str, Any]] = []
        self._active = False

    def adopt(self, module: Any) -> None:
        """Put the layers behind a module's settings and the generation behind its caches."""
        if not self._active or not isinstance(module, self._home.ConfigModule):
            return
        generation = _Generation()
        unset = self._home._UNSET_SENTINEL
        for entry in module._config.values():
            if isinstance(entry.user_override, ContextVar):
                self._put(entry, "user_override", Override(entry.user_override, generation, unset))
        for name, stale in (("_hash_dirty_var", True), ("_get_dict_dirty_keys_var", None)):
            variable = vars(module).get(name)
            if isinstance(variable, ContextVar):
                self._put(module, name, Stamped(variable, generation, stale))

    def _put(self, owner: Any, name: str, new: Any) -> None:
        self._adopted.append((owner, name, new))
        setattr(owner, name, new)

    def set(self) -> None:
        self._active = True
        for module in list(sys.modules.values()):
            if issubclass(type(module), self._home.ConfigModule):
                self.adopt(module)

    def undo(self) -> UndoState:
        self._active = False
        for owner, name, new in reversed(self._adopted):
            if getattr(owner, name) is new:
                if isinstance(new, Override):
                    new.give_up()
                setattr(owner, name, new.variable)
        self._adopted.clear()
        return "restored"

    def current_is_ours(self) -> bool:
        return self._active

    def describe(self) -> str:
        return f"{_MODULE}: the settings of all configuration modules"


class _Layers(Edit):
    """The two layers, `config.patch()` that keeps to its own, and modules installed later."""

    @property
    def modules(self) -> tuple[str, ...]:
        return (_MODULE,)

    def inspect(self) -> Finding:
        home = sys.modules[_MODULE]
        for name in _NEEDED:
            if not hasattr(home, name):
                return Finding("missing", f"{_MODULE}:{name} is not in this torch")
        for name in ("patch", "_make_closure_patcher", "get_hash"):
            if name not in vars(home.ConfigModule):
                return Finding("drifted", f"{_MODULE}:ConfigModule has no {name}")
        kind = home._ConfigEntry.__annotations__.get("user_override", "")
        if "ContextVar" not in str(kind):
            return Finding("fixed", "settings are not per thread in this torch")
        return Finding("ok", "each thread has settings of its own, and others' are not seen")

    def build(self) -> list[Slot]:
        home: Any = sys.modules[_MODULE]
        patch_id = patch_being_built()
        adoption = _Adoption()

        def install(original: Any) -> Any:
            def install_config_module(module: Any) -> Any:
                result = original(module)
                adoption.adopt(module)
                return result

            return install_config_module

        places: list[tuple[Any, str, Any]] = [(home, "install_config_module", install)]
        for cls in vars(home).values():
            if isinstance(cls, type) and issubclass(cls, home.ConfigModule):
                for name, factory in (
                    ("patch", _patch),
                    ("_make_closure_patcher", closure_patcher),
                    ("get_hash", hash_anew if cls is home.ConfigModule else None),
                ):
                    if factory is not None and name in vars(cls):
                        places.append((cls, name, factory))
        slots: list[Slot] = []
        for owner, name, factory in places:
            original = vars(owner)[name]
            new = finish_wrapper(factory(original), original, patch_id)
            slots.append(AttrSlot(owner, name, new))
        return [*slots, adoption]


PATCH = Patch(
    id="config_inherit",
    title="A setting assigned in one thread must hold in threads without one of their own",
    why=(
        "From torch 2.12 on torch._dynamo.config.x = … in the main thread is invisible to worker "
        "threads, executors and server threads: they compile with the defaults, silently "
        "(recompile_limit 8, no max_autotune)."
    ),
    affects=">=2.12.0.dev0",
    edits=(_Layers(),),
    repro="repro/config_inherit.py",
    links=("https://github.com/pytorch/pytorch/issues/186537",),
    signs=(
        Sign(  # the limit that was raised in the main thread is not known in this one
            text=r"FailOnRecompileLimitHit: ",
            in_thread=True,
            sure=False,
        ),
    ),
)
