"""The import hook: told at the end of an execution, never in the middle, and gone without trace."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import pytest

from torchcompat.hooks import ImportHook

WAIT_S = 30.0


class Told:
    """A hook with the list of what it reported; a module is asked for its last name at the end."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.hook = ImportHook(
            lambda name: self.calls.append(("before", name)),
            lambda name: self.calls.append((name, hasattr(sys.modules[name], "LAST"))),
        )


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.hook.watch(())
    assert told.hook not in sys.meta_path


def test_only_watched_modules_and_no_trace_on_them(lib: Any, told: Told) -> None:
    name = lib.write("late", "LOADER = __loader__, __spec__.loader\nLAST = 1")
    told.hook.watch([name])
    assert sys.meta_path[0] is told.hook
    module = lib.load("late")
    lib.load("leaf")
    assert told.calls == [("before", name), (name, True)]
    plain = lib.load("leaf")
    assert type(module.__loader__) is type(plain.__loader__)
    assert module.__spec__.loader is module.__loader__
    assert (module.__loader__, module.__loader__) == module.LOADER
    told.hook.watch(())
    assert told.hook not in sys.meta_path


def test_an_import_under_way_skips_no_finder_when_the_hook_goes(
    lib: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = ImportHook(print, print)

    class Goes:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            hook.watch(())

    monkeypatch.setattr(sys, "meta_path", [Goes(), PathFinder])
    hook.watch(["nothing"])
    assert importlib.util.find_spec(lib.name) is not None
    assert hook not in sys.meta_path


def test_reload_reports_again(lib: Any, told: Told) -> None:
    name = lib.write("late", "LAST = 1")
    told.hook.watch([name])
    importlib.reload(lib.load("late"))
    assert told.calls == [("before", name), (name, True)] * 2


def test_an_import_that_fails_midway_is_not_reported_and_the_next_one_is(
    lib: Any, told: Told
) -> None:
    name = lib.write(
        "late", "import builtins\nif not hasattr(builtins, 'GO'): raise OSError\nLAST = 1"
    )
    told.hook.watch([name])
    with pytest.raises(OSError):
        lib.load("late")
    assert told.calls == [("before", name)]
    assert not told.hook.is_ready(name)
    import builtins

    builtins.GO = 1  # type: ignore[attr-defined]
    try:
        lib.load("late")
    finally:
        del builtins.GO  # type: ignore[attr-defined]
    assert told.calls[-1] == (name, True)
    assert told.hook.is_ready(name)


def test_a_callback_that_raises_does_not_break_the_import(
    lib: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(name: str) -> None:
        raise RuntimeError("no")

    hook = ImportHook(bad, bad)
    hook.watch([lib.leaf_name])
    try:
        assert lib.load().compute(2) == 2
    finally:
        hook.watch(())
    assert caplog.text.count("torchcompat failed at the import of") == 2


def test_other_hooks_that_ask_importlib_again(lib: Any, told: Told) -> None:
    class Asking:
        """As wrapt's finder does."""

        busy = False

        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if self.busy or not name.startswith(lib.name + "."):
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    name = lib.write("late", "LAST = 1")
    for first in (True, False):
        asking = Asking()
        told.hook.watch([name])
        sys.meta_path.insert(0 if first else 1, asking)
        try:
            lib.load("late")
        finally:
            sys.meta_path.remove(asking)
            del sys.modules[name]
        assert told.calls == [("before", name), (name, True)]
        told.calls.clear()
        told.hook.watch(())


SLOW = """
import sys
EARLY = 1
sys.modules["gates"].enter()
LAST = 1
"""


class Gates:
    """Stands in sys.modules as `gates`: the import of a SLOW module stops in `enter`."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

    def enter(self) -> None:
        self.inside.set()
        assert self.leave.wait(WAIT_S)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Gates:
    gates = Gates()
    monkeypatch.setitem(sys.modules, "gates", gates)  # type: ignore[arg-type]
    return gates


def test_a_module_that_another_thread_imports_is_waited_for(
    lib: Any, told: Told, gates: Gates, worker: Any
) -> None:
    name = lib.write("slow", SLOW)
    importing = worker(lambda: lib.load("slow"))  # begun without the hook
    assert gates.inside.wait(WAIT_S)
    assert name in sys.modules
    assert not told.hook.is_ready(name)
    waiting = worker(lambda: told.hook.wait_for([name]))
    waiting.join(0.1)
    assert waiting.is_alive()
    gates.leave.set()
    waiting.get()
    assert told.hook.is_ready(name)
    importing.get()


def test_a_module_that_this_thread_imports_is_reported_at_its_end(lib: Any, told: Told) -> None:
    name = lib.write("own", "import sys\nsys.modules['gates'].enter()\nLAST = 1")

    class InTheMiddle:
        def enter(self) -> None:
            told.hook.wait_for([name])
            told.hook.wait_for([name])  # twice is once
            assert not told.hook.is_ready(name)
            told.calls.append("middle")

    sys.modules["gates"] = InTheMiddle()  # type: ignore[assignment]
    try:
        module = lib.load("own")
    finally:
        del sys.modules["gates"]
    assert told.calls == ["middle", (name, True)]
    assert told.hook.is_ready(name)
    assert type(module.__spec__) is ModuleSpec


def test_one_that_this_thread_imports_and_that_fails(lib: Any, told: Told) -> None:
    name = lib.write("own", "import sys\nsys.modules['gates'].enter()\nraise OSError")

    class InTheMiddle:
        def enter(self) -> None:
            told.hook.wait_for([name])

    sys.modules["gates"] = InTheMiddle()  # type: ignore[assignment]
    try:
        with pytest.raises(OSError):
            lib.load("own")
    finally:
        del sys.modules["gates"]
    assert told.calls == []
    assert not told.hook.is_ready(name)


def test_ready_is_known_before_the_machinery_says_so(lib: Any) -> None:
    """Between the end of the execution and `_initializing = False` a module counts as ready."""
    seen = []
    hook = ImportHook(lambda name: None, lambda name: seen.append(hook.is_ready(name)))
    name = lib.write("late", "LAST = 1")
    hook.watch([name])
    try:
        lib.load("late")
    finally:
        hook.watch(())
    assert seen == [True]


def test_a_reload_under_way_is_not_ready(lib: Any, told: Told) -> None:
    name = lib.write("again", "import sys\nsys.modules['gates'].enter()\nLAST = 1")
    seen = []

    class Look:
        def enter(self) -> None:
            seen.append(told.hook.is_ready(name))

    told.hook.watch([name])
    sys.modules["gates"] = Look()  # type: ignore[assignment]
    try:
        importlib.reload(lib.load("again"))
    finally:
        del sys.modules["gates"]
    assert seen == [False, False]
    assert told.hook.is_ready(name)
