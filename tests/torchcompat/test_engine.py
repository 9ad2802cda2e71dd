"""Plan, apply, unapply on a small library: states, order, all-or-nothing, pending and reloads."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from torchcompat import PatchNotApplied, State, Value, Wrap
from torchcompat.errors import ConfigError
from torchcompat.install import AttrSlot, Slot
from torchcompat.patch import Edit
from torchcompat.verdict import Finding

Make = Callable[..., Any]
WAIT_S = 30.0


def states(report: Any) -> dict[str, str]:
    return {v.patch_id: v.state.value for v in report}


def test_apply_and_unapply(leaf: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine, original = engine_of(patch_of(wrap())), leaf.compute
    assert states(engine.plan(None)) == {"p": "ok"}
    assert leaf.compute is original
    report = engine.apply(None, None)
    assert (states(report), bool(report)) == ({"p": "applied"}, True)
    assert report["p"].provenance == "test"
    new = leaf.compute
    assert states(engine.apply(None, None)) == {"p": "applied"}
    assert leaf.compute is new, "applied once"
    assert states(engine.plan(None)) == states(engine.status()) == {"p": "applied"}
    assert states(engine.unapply(None)) == {"p": "disabled"}
    assert leaf.compute is original
    assert len(engine.unapply(None)) == 0
    assert states(engine.unapply(["p"])) == {"p": "disabled"}


class Injected(Edit):
    """Sets FLAG; fails on demand while judged, built or installed."""

    def __init__(self, module: str, fail: str) -> None:
        self.module, self.fail = module, fail

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.module,)

    def _maybe(self, here: str) -> None:
        if self.fail == here:
            raise RuntimeError(f"injected in {here}")

    def inspect(self) -> Finding:
        self._maybe("inspect")
        return Finding("ok", "injected")

    def build(self) -> list[Slot]:
        self._maybe("build")
        edit = self

        class FailingSlot(AttrSlot):
            def set(self) -> None:
                edit._maybe("set")
                super().set()

        return [FailingSlot(sys.modules[self.module], "FLAG", "new")]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("fail", ["inspect", "build", "set"])
def test_a_failure_at_any_edit_leaves_nothing_behind(
    lib: Any, leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, at: int, fail: str
) -> None:
    edits = [wrap(), wrap("Box.make"), Value(target=lib.target("N"), factory=str, create=True)]
    edits.insert(at, Injected(lib.leaf_name, fail))
    other = wrap("Box.get")
    engine = engine_of(patch_of(*edits), patch_of(other, id="other"))
    before, in_box = dict(vars(leaf)), dict(vars(leaf.Box))
    report = engine.apply(None, None)
    assert states(report) == {"p": "failed", "other": "applied"}, "the other goes on"
    assert report["p"].reason == f"RuntimeError: injected in {fail}"
    engine.unapply(["other"])
    assert vars(leaf) == before
    assert dict(vars(leaf.Box)) == in_box
    with pytest.raises(PatchNotApplied) as caught:
        engine.apply(["p"], None)
    assert (caught.value.patch_id, caught.value.verdict.state) == ("p", State.FAILED)


def test_a_place_that_cannot_be_undone_is_told_and_kept(
    lib: Any, leaf: Any, patch_of: Make, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(patch_of(Injected(lib.leaf_name, "")))
    engine.apply(None, None)
    with monkeypatch.context() as m:
        m.setattr(AttrSlot, "undo", lambda self: 1 / 0)
        verdict = engine.unapply(None)["p"]
    assert verdict.state is State.FAILED
    assert "FLAG could not be undone: division by zero" in verdict.reason
    assert states(engine.unapply(None)) == {"p": "disabled"}
    assert leaf.FLAG == "stock"


def test_requires_come_first_come_along_and_go_first(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    base = patch_of(wrap(label="base"), id="base")
    top = patch_of(wrap(label="top"), id="top", requires=("base",))
    engine, original = engine_of(base, top), leaf.compute
    assert states(engine.plan(["top"])) == {"base": "ok", "top": "ok"}
    assert states(engine.apply(["top"], None)) == {"base": "applied", "top": "applied"}
    assert leaf.compute(1) == ("top", ("base", 1))
    assert list(states(engine.unapply(["base"]))) == ["top", "base"]
    assert leaf.compute is original


def test_blocked_and_conflict(leaf: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine = engine_of(
        patch_of(wrap("gone"), id="base"),
        patch_of(wrap(), id="top", requires=("base",)),
        patch_of(wrap(), id="a"),
        patch_of(wrap(), id="b", conflicts=("a",)),
        patch_of(wrap(), id="lost", requires=("nobody",)),
    )
    expected = {
        "base": "missing",
        "top": "blocked",
        "a": "applied",
        "b": "conflict",
        "lost": "blocked",
    }
    assert {**states(engine.plan(None)), "a": "applied"} == expected
    report = engine.apply(None, None)
    assert (states(report), bool(report)) == (expected, False)


def test_unapply_beneath_another_patch(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    engine = engine_of(patch_of(wrap(label="a"), id="a"), patch_of(wrap(label="b"), id="b"))
    original = leaf.compute
    engine.apply(None, None)
    assert states(engine.unapply(["a"])) == {"a": "disabled"}
    assert leaf.compute(1) == ("b", 1)
    engine.apply(None, None)
    assert leaf.compute(1) == ("a", ("b", 1))
    engine.unapply(["b"])
    engine.unapply(["a"])
    assert leaf.compute is original


def test_only_strict_and_unknown_names(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(
        patch_of(wrap(), id="good"),
        patch_of(wrap("gone"), id="bad"),
        patch_of(wrap(), id="extra", opt_in=True),
    )
    assert states(engine.apply(None, None)) == {
        "good": "applied",
        "bad": "missing",
        "extra": "disabled",
    }
    assert states(engine.apply(["extra"], None)) == {"extra": "applied"}
    assert states(engine.apply([], None)) == {}
    assert states(engine.apply(["bad"], False)) == {"bad": "missing"}
    for only, strict in ((["bad"], None), (["bad"], True), (None, True)):
        with pytest.raises(PatchNotApplied, match=r"'bad' is missing: .*gone does not exist"):
            engine.apply(only, strict)
    for call in (engine.plan, engine.unapply, lambda ids: engine.apply(ids, None)):
        with pytest.raises(ConfigError, match="unknown patch 'goood', did you mean 'good'"):
            call(["goood"])
    monkeypatch.setenv("TORCHCOMPAT", "strict")
    with pytest.raises(PatchNotApplied):
        engine.apply(None, None)
    monkeypatch.setenv("TORCHCOMPAT", "on")
    monkeypatch.setenv("TORCHCOMPAT_DISABLE", "good")
    engine.unapply(None)
    with pytest.raises(PatchNotApplied, match="disabled by TORCHCOMPAT_DISABLE"):
        engine.apply(["good"], None)
    monkeypatch.setenv("TORCHCOMPAT_DISABLE", "godo")
    with pytest.raises(ConfigError, match="TORCHCOMPAT_DISABLE: unknown patch 'godo'"):
        engine.apply(None, None)


def test_switched_off(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, original = engine_of(patch_of(wrap())), leaf.compute
    monkeypatch.setenv("TORCHCOMPAT", "off")
    assert states(engine.apply(["p"], True)) == {"p": "disabled"}
    assert len(engine.apply(None, None)) == 0
    assert states(engine.plan(None)) == {"p": "disabled"}
    assert leaf.compute is original


def test_one_line_is_logged_once(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(patch_of(wrap("gone")), patch_of(wrap(), id="q"))
    with caplog.at_level(logging.WARNING):
        engine.apply(None, None)
        engine.apply(None, None)
    assert len(caplog.records) == 1
    assert "not applied: p missing: " in caplog.text


# -- pending


def test_pending_until_the_module_has_been_executed(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    engine = engine_of(patch_of(wrap()))
    assert states(engine.plan(None)) == {"p": "pending"}
    assert states(engine.apply(None, None)) == states(engine.status()) == {"p": "pending"}
    assert lib.leaf_name not in sys.modules
    leaf = lib.load()
    assert leaf.compute(1) == ("new", 1)
    assert states(engine.status()) == states(engine.apply(None, None)) == {"p": "applied"}


def test_pending_is_judged_again_when_its_time_comes(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(patch_of(wrap("gone")))
    engine.apply(["p"], True)
    lib.load()
    assert states(engine.status()) == {"p": "missing"}
    assert "not applied: p missing" in caplog.text


def test_pending_and_taken_away_stays_away(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    engine = engine_of(patch_of(wrap()))
    engine.apply(None, None)
    assert states(engine.unapply(None)) == {"p": "disabled"}
    assert engine._hook not in sys.meta_path
    assert lib.load().compute(1) == 1


def test_several_modules_are_patched_together_or_not_at_all(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    late = lib.write("late", "def f():\n    return 0\n")
    engine = engine_of(patch_of(wrap(), wrap(target=f"{late}:f")))
    engine.apply(None, None)
    leaf = lib.load()
    assert leaf.compute(1) == 1
    assert lib.load("late").f() == ("new", 0)
    assert leaf.compute(1) == ("new", 1)


def test_what_waits_for_a_required_patch_follows_it(
    lib: Any, leaf: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    late = lib.write("late", "def f():\n    return 0\n")
    engine = engine_of(
        patch_of(wrap(target=f"{late}:f"), id="base"),
        patch_of(wrap(), id="top", requires=("base",)),
    )
    assert states(engine.apply(None, None)) == {"base": "pending", "top": "pending"}
    lib.load("late")
    assert leaf.compute(1) == ("new", 1)


def test_an_import_that_fails_midway_leaves_it_pending_and_the_next_one_counts(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make
) -> None:
    name = lib.write("late", "def f():\n    return 0\nraise OSError\n")
    engine = engine_of(patch_of(wrap(target=f"{name}:f")))
    engine.apply(None, None)
    with pytest.raises(OSError):
        lib.load("late")
    assert states(engine.status()) == {"p": "pending"}
    lib.write("late", "def f():\n    return 'second attempt'\n")
    assert lib.load("late").f() == ("new", "second attempt")


HALF = """
def f():
    return "first"

import sys
sys.modules["gates"].enter()

def f():
    return "last"
"""


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`enter` is called by HALF in the middle of its execution."""

    class Gates:
        inside, leave = threading.Event(), threading.Event()

        def enter(self) -> None:
            self.inside.set()
            assert self.leave.wait(WAIT_S)

    gates = Gates()
    monkeypatch.setitem(sys.modules, "gates", gates)  # type: ignore[arg-type]
    return gates


def test_a_half_imported_module_of_another_thread_is_waited_for(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, gates: Any, worker: Any
) -> None:
    name = lib.write("half", HALF)
    engine = engine_of(patch_of(wrap(target=f"{name}:f"), id="p"), patch_of(wrap(), id="q"))
    importing = worker(lambda: lib.load("half"))
    assert gates.inside.wait(WAIT_S)
    applying = worker(lambda: engine.apply(None, None))
    applying.join(0.1)
    assert applying.is_alive()
    # Nobody holds the engine's lock meanwhile.
    assert states(worker(lambda: engine.plan(None)).get()) == {"p": "pending", "q": "pending"}
    gates.leave.set()
    assert states(applying.get()) == {"p": "applied", "q": "pending"}
    assert importing.get().f() == ("new", "last")


def test_a_half_imported_module_of_this_thread_is_patched_at_its_end(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, gates: Any
) -> None:
    name = lib.write("half", HALF)
    engine = engine_of(patch_of(wrap(target=f"{name}:f")))
    seen = []

    def enter() -> None:
        seen.append(states(engine.apply(None, None)))
        seen.append(sys.modules[name].f())  # type: ignore[attr-defined]

    gates.enter = enter
    assert lib.load("half").f() == ("new", "last")
    assert seen == [{"p": "pending"}, "first"]
    engine.unapply(None)
    assert lib.load("half").f() == "last"


def test_a_module_half_imported_by_this_thread_that_fails(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, gates: Any
) -> None:
    name = lib.write("half", HALF + "raise OSError\n")
    engine = engine_of(patch_of(wrap(target=f"{name}:f")))
    gates.enter = lambda: engine.apply(None, None)
    with pytest.raises(OSError):
        lib.load("half")
    assert states(engine.status()) == {"p": "pending"}
    lib.write("half", "def f():\n    return 'whole'\n")
    assert lib.load("half").f() == ("new", "whole")


def test_reload(lib: Any, leaf: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine = engine_of(patch_of(wrap(), wrap("Box.get")))
    engine.apply(None, None)
    assert importlib.reload(leaf) is leaf
    assert (leaf.compute(1), leaf.Box().get(1)) == (("new", 1), ("new", ("stock", 1)))
    assert states(engine.status()) == {"p": "applied"}
    fresh = leaf.compute.__wrapped__
    engine.unapply(None)
    assert leaf.compute is fresh


def test_a_second_copy_of_the_module(lib: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine = engine_of(patch_of(wrap()))
    first = lib.load()
    engine.apply(None, None)
    del sys.modules[lib.leaf_name]
    second = lib.load()
    assert (first.compute(1), second.compute(1)) == (1, ("new", 1))


# -- others


def test_others_over_ours(leaf: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine = engine_of(patch_of(wrap()))
    engine.apply(None, None)
    ours = leaf.compute
    leaf.compute = functools.wraps(ours)(lambda x: ["theirs", ours(x)])
    assert states(engine.status()) == {"p": "applied"}, "calls still come to us"
    verdict = engine.unapply(None)["p"]
    assert (verdict.state, "now inert" in verdict.reason) == (State.DISPLACED, True)
    assert leaf.compute(1) == ["theirs", 1]
    engine.apply(None, None)
    assert leaf.compute(1) == ("new", ["theirs", 1])
    engine.unapply(None)
    assert leaf.compute(1) == ["theirs", 1]


def test_others_in_place_of_ours(leaf: Any, wrap: Make, patch_of: Make, engine_of: Make) -> None:
    engine = engine_of(patch_of(wrap()))
    engine.apply(None, None)
    leaf.compute = lambda x: "theirs"
    verdict = engine.apply(None, None)["p"]
    assert verdict.state is State.DISPLACED
    assert "put in place of" in verdict.reason
    assert leaf.compute(1) == "theirs"


def test_a_target_that_never_holds_still_ends_as_a_verdict(
    lib: Any, leaf: Any, patch_of: Make, engine_of: Make
) -> None:
    def factory(original: Any) -> Any:
        leaf.compute = lambda x: "moved"
        return original

    engine = engine_of(patch_of(Wrap(target=lib.target("compute"), factory=factory)))
    verdict = engine.apply(None, None)["p"]
    assert (verdict.state, "kept changing" in verdict.reason) == (State.FAILED, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_while_the_lock_is_held_can_apply(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    engine = engine_of(patch_of(wrap()))
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._lock:
            held.set()
            free.wait(WAIT_S)

    holding = worker(hold)
    assert held.wait(WAIT_S)
    threading.Timer(0.05, free.set).start()  # fork() waits for a whole state
    child = os.fork()
    if child == 0:
        code = 1
        try:
            applied = worker(lambda: engine.apply(None, None)).get()["p"].state is State.APPLIED
            code = 0 if applied and leaf.compute(1) == ("new", 1) else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holding.get()
    assert states(engine.apply(None, None)) == {"p": "applied"}


def test_a_patch_taken_away_while_its_places_are_looked_at_is_not_displaced(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(patch_of(wrap()))
    engine.apply(None, None)
    (slot,) = engine.slots()
    real = type(slot).is_effective

    def take_away_first(self: Any) -> bool:
        monkeypatch.setattr(type(slot), "is_effective", real)
        engine.unapply(None)
        return real(self)

    monkeypatch.setattr(type(slot), "is_effective", take_away_first)
    assert [v.state for v in engine.status()] == [State.DISABLED]
