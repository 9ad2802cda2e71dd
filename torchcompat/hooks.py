"""Be told when a module of torch has been executed to its end, whoever imports it, and when it is
about to be executed again.

"In sys.modules" is not "imported": another thread, or a caller further up in this one, may be in
the middle of the module. So a module counts as ready only when its execution has ended.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast
from weakref import WeakValueDictionary

log = logging.getLogger("torchcompat")


class ImportHook:
    """A meta-path finder for exactly the watched modules, removed when there are none.

    `before(name)` is called when a watched module is about to be executed, `after(name)` when it
    has been, both in the importing thread, which holds the module's import lock.
    """

    def __init__(self, before: Callable[[str], None], after: Callable[[str], None]) -> None:
        self._before, self._after = before, after
        self._watched: frozenset[str] = frozenset()
        self._executing: set[str] = set()  # a reload shows nowhere else
        # Modules executed to the end under us; their spec says so only a moment later.
        self._executed: WeakValueDictionary[str, ModuleType] = WeakValueDictionary()
        self._finding = threading.local()

    def watch(self, names: Iterable[str]) -> None:
        """Watch these modules and no others. The caller serialises calls."""
        self._watched = frozenset(names)
        if self._watched and self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif not self._watched and self in sys.meta_path:
            # A new list: taken out of the old one, the next finder would be skipped by an import
            # that is walking it in another thread, which then finds no module.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def is_ready(self, name: str) -> bool:
        """Whether the module is imported and its execution has ended."""
        module = sys.modules.get(name)
        if module is None or name in self._executing:
            return False
        return not _is_initializing(module) or self._executed.get(name) is module

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait for modules that other threads are importing right now. One that this thread itself
        is importing cannot be waited for: `after` is called when it is done. Call with the modules
        watched already and without locks."""
        for name in names:
            if self.is_ready(name):
                continue
            if name not in sys.modules:
                # Perhaps already found by an import that never saw this hook, and about to be run.
                _let_imports_end(name)
            else:
                try:
                    importlib.import_module(name)  # blocks on the module's lock
                except Exception as e:  # noqa: BLE001 - the other's import failed: not imported
                    log.debug("import of %s, waited for, failed: %s", name, e)
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if type(spec) is ModuleSpec and not self.is_ready(name):
                _call_when_initialized(spec, self._ended)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec, with a loader that reports to us."""
        if name not in self._watched or name in self._in_progress():
            return None
        self._in_progress().add(name)  # other hooks ask importlib again, which asks us
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._in_progress().discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast("Any", _ReportingLoader(spec.loader, self))
        return spec

    def _in_progress(self) -> set[str]:
        return cast("set[str]", self._finding.__dict__.setdefault("names", set()))

    def _ask_others(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def _execute(self, name: str, run: Callable[[], None]) -> None:
        self._executed.pop(name, None)
        self._executing.add(name)
        try:
            self._report(self._before, name)
            run()
        finally:
            self._executing.discard(name)
        self._ended(name)

    def _ended(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is not None:
            self._executed[name] = module
            self._report(self._after, name)

    def _report(self, callback: Callable[[str], None], name: str) -> None:
        try:
            callback(name)
        except Exception:  # an import must not fail for our sake
            log.exception("torchcompat failed at the import of %s", name)


class _ReportingLoader:
    """Stands for the real loader until the module is executed, then is gone without a trace."""

    def __init__(self, inner: Any, hook: ImportHook) -> None:
        self._inner, self._hook = inner, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return cast("ModuleType | None", self._inner.create_module(spec))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._hook._execute(name, lambda: self._inner.exec_module(module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _let_imports_end(name: str) -> None:
    """Wait on the module's import lock without importing it; there is no public way to."""
    lock_and_unlock = getattr(importlib._bootstrap, "_lock_unlock_module", None)
    if lock_and_unlock is not None:
        lock_and_unlock(name)


def _call_when_initialized(spec: ModuleSpec, callback: Callable[[str], None]) -> None:
    """Call `callback` with the name when the import machinery declares the module of `spec` done.

    The import is under way without our loader, and its last act, in success and failure, is to set
    `spec._initializing` to False.
    """

    class WatchedSpec(ModuleSpec):
        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__.get("_initializing"))

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                _set_class(self, ModuleSpec)
                callback(self.name)

    _set_class(spec, WatchedSpec)
    if type(spec) is WatchedSpec and not spec._initializing:
        _set_class(spec, ModuleSpec)  # it ended between the caller's look and ours
        callback(spec.name)


def _set_class(value: Any, cls: type) -> None:
    value.__class__ = cls
