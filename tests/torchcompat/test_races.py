"""Many threads apply and take away the same patches while others call what is patched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchcompat import State, Value
from torchcompat.errors import PatchNotApplied

Make = Callable[..., Any]
WAIT_S = 30.0
THREADS = 6


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def together(worker: Any, work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run `work(0..count-1)` in threads that start at once; their results."""
    barrier = threading.Barrier(count)

    def one(i: int) -> Any:
        barrier.wait(WAIT_S)
        return work(i)

    return [w.get() for w in [worker(lambda i=i: one(i)) for i in range(count)]]


def test_many_apply_at_once_and_it_is_applied_once(
    leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    original = leaf.compute
    for _ in range(10):
        engine = engine_of(patch_of(wrap(), wrap("Box.get")), patch_of(wrap(), id="q"))
        reports = together(worker, lambda i, e=engine: e.apply(None, None))
        assert all(v.state is State.APPLIED for r in reports for v in r)
        assert leaf.compute(1) == ("new", ("new", 1))
        engine.unapply(None)
        assert leaf.compute is original


def test_apply_and_unapply_race(
    lib: Any, leaf: Any, wrap: Make, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    """Every state that a caller sees is one of whole patches; the end is as if in some order."""
    a = patch_of(wrap(label="a"), Value(target=lib.target("FLAG"), factory=lambda v: "a"), id="a")
    b = patch_of(wrap(label="b"), wrap("Box.get"), id="b", requires=("a",))
    engine = engine_of(a, b)
    originals = leaf.compute, vars(leaf.Box)["get"], leaf.FLAG
    allowed = {State.APPLIED, State.DISABLED, State.BLOCKED}
    calls: set[Any] = set()

    def work(i: int) -> None:
        for k in range(25):
            calls.add(leaf.compute(1))
            step = (i + k) % 3
            if step == 0:
                report = engine.apply(None, None)
            elif step == 1:
                report = engine.unapply(["a"] if i % 2 else None)
            else:
                report = engine.status()
            assert {v.state for v in report} <= allowed | ({State.OK} if step == 2 else set())

    together(worker, work)
    assert calls <= {1, ("a", 1), ("b", 1), ("b", ("a", 1))}
    engine.unapply(None)
    assert (leaf.compute, vars(leaf.Box)["get"], leaf.FLAG) == originals
    assert all(v.state is State.APPLIED for v in engine.apply(None, True))


def test_apply_races_with_the_import(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    """Whoever is first, the module is patched once both are done."""
    for k in range(15):
        name = lib.write(f"m{k}", "def f():\n    return 0\n" + "x = 1\n" * 200 + "LAST = 1\n")
        engine = engine_of(patch_of(wrap(target=f"{name}:f")))

        def work(i: int, e: Any = engine, module: str = f"m{k}") -> Any:
            return lib.load(module) if i % 2 else e.apply(None, None)

        module = together(worker, work, 4)[1]
        assert module.f() == ("new", 0)
        assert [v.state for v in engine.status()] == [State.APPLIED]
        engine.unapply(None)


def test_import_in_one_thread_apply_in_the_import_of_another(
    lib: Any, wrap: Make, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    """Two modules whose executions apply patches to each other: no deadlock, both patched."""
    one = lib.write("one", "import sys\nsys.modules['engine_hook'].go()\ndef f():\n    return 1\n")
    two = lib.write("two", "import sys\nsys.modules['engine_hook'].go()\ndef f():\n    return 2\n")
    engine = engine_of(
        patch_of(wrap(target=f"{one}:f"), id="one"), patch_of(wrap(target=f"{two}:f"), id="two")
    )
    barrier = threading.Barrier(2)

    class Go:
        def go(self) -> None:
            barrier.wait(WAIT_S)
            engine.apply(None, None)

    sys.modules["engine_hook"] = Go()  # type: ignore[assignment]
    try:
        modules = [worker(lambda n=n: lib.load(n)) for n in ("one", "two")]
        results = [m.get() for m in modules]
    finally:
        del sys.modules["engine_hook"]
    assert [m.f() for m in results] == [("new", 1), ("new", 2)]


def test_a_factory_may_be_slow_without_holding_anybody_up(
    leaf: Any, lib: Any, patch_of: Make, engine_of: Make, worker: Any
) -> None:
    from torchcompat import Wrap

    inside, leave = threading.Event(), threading.Event()

    def factory(original: Any) -> Any:
        inside.set()
        assert leave.wait(WAIT_S)
        return lambda *a: ("slow", original(*a))

    engine = engine_of(patch_of(Wrap(target=lib.target("compute"), factory=factory)))
    applying = worker(lambda: engine.apply(["p"], True))
    assert inside.wait(WAIT_S)
    worker(lambda: engine.unapply(None)).get()
    worker(engine.status).get()
    leave.set()
    try:
        applying.get()
    except PatchNotApplied as e:  # pragma: no cover - shows the verdict if it ever fails
        pytest.fail(str(e))
    assert leaf.compute(1) == ("slow", 1)
