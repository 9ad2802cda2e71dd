"""What holds for every patch, as tests that anybody can run over his own.

    from torchcompat.testing import conformance

    TestPatches = conformance("acme")          # the patches of one plugin
    TestAll = conformance()                    # of all that are installed

`conformance` gives a class of pytest tests, parametrised over the patches that fit the installed
torch: whole or not at all, undone exactly, nothing to see from outside, compiled equal to eager,
races, failures while being applied, all orders of import, and the patch's own program.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, ClassVar, Final

import pytest

import torchcompat
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError
from torchcompat.install import AttrSlot, CodeSlot, ModulePropertySlot, Slot
from torchcompat.prove import FIXED_BY_US, NOT_HERE, child_environ, fresh_plan, prove
from torchcompat.target import own_attribute, unbind
from torchcompat.verdict import State, Verdict

WAIT_S: Final = 30.0
#: Where no work is to be done: torch is right, or has not what the patch is about.
RESTING: Final = frozenset({State.FIXED, State.NOT_AFFECTED, State.PENDING, State.DISABLED})
ORDERS: Final = (
    "torch apply compile unapply compile",
    "apply torch compile unapply compile",
    "apply apply torch compile apply compile",
    "torch compile apply compile unapply apply compile",
    "apply unapply torch compile",
    "apply unapply torch apply compile unapply compile",
)
_PROGRAM_TEST: Final = "test_the_program_shows_the_fault_without_the_patch_only"
# In a process of its own: the order of steps, then the patches.
_PROGRAM: Final = """
import sys
import torchcompat
ids = sys.argv[2].split()
for step in sys.argv[1].split():
    if step == "torch":
        import torch
    elif step == "compile":
        x = torch.ones(3)
        f = torch.compile(lambda y: y.sin() + len(ids), backend="eager", fullgraph=True)
        assert torch.equal(f(x), x.sin() + len(ids))
    elif step == "apply":
        report = torchcompat.apply(only=ids, strict=False)
        assert not report.findings, str(report)
    else:
        torchcompat.unapply()
settled = {"applied", "pending", "fixed", "not_affected", "ok", "disabled"}
wrong = [v for v in torchcompat.status() if v.patch_id in ids and v.state.value not in settled]
assert not wrong, wrong
print("right")
"""


def conformance(
    plugin: str | None = None, *, ids: Sequence[str] | None = None
) -> type[Conformance]:
    """The tests, for the patches named in `ids`, or all of `plugin` ("acme" for "acme:…"), or all.

    A plugin or id that is not installed fails a test of its own, so that a suite cannot pass by
    looking at nothing.
    """
    fields = {"plugin": plugin, "ids": None if ids is None else tuple(ids), "__test__": True}
    return type("TestConformance", (Conformance,), fields)


class Conformance:
    """Give `plugin` or `ids` in a subclass, and `__test__ = True`; override `module_and_input` for
    what the patch is about.

    `reproducers`: whether the patches' programs are run too, two processes for each.
    """

    __test__: ClassVar[bool] = False
    plugin: ClassVar[str | None] = None
    ids: ClassVar[tuple[str, ...] | None] = None
    reproducers: ClassVar[bool] = True
    backends: ClassVar[tuple[str, ...]] = ("eager", "aot_eager")
    orders: ClassVar[tuple[str, ...]] = ORDERS

    # -- which patches

    @classmethod
    def verdicts(cls) -> list[Verdict]:
        """On every patch that the class is about, with all that they look at imported."""
        wanted = cls.ids
        return [
            v
            for v in fresh_plan()
            if (v.patch_id in wanted if wanted is not None else _is_of(v.patch_id, cls.plugin))
        ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        fitting = [v.patch_id for v in self.verdicts() if v.state in (State.OK, State.APPLIED)]
        if not self.reproducers and metafunc.function.__name__ == _PROGRAM_TEST:
            metafunc.parametrize("patch_id", [])
        elif "patch_id" in metafunc.fixturenames:
            with_all = getattr(metafunc.function, "also_all", False) and len(fitting) > 1
            metafunc.parametrize("patch_id", [*fitting, *(["all"] if with_all else [])])
        if "backend" in metafunc.fixturenames:
            metafunc.parametrize("backend", self.backends)
        if "order" in metafunc.fixturenames:
            metafunc.parametrize("order", self.orders)

    @pytest.fixture(autouse=True)
    def _stock_torch(self) -> Iterator[None]:
        """Every test begins and ends without patches; those of before are applied again."""
        before = sorted(ENGINE.active())
        torchcompat.unapply()
        yield
        torchcompat.unapply()
        _torch()._dynamo.reset()
        if before:
            torchcompat.apply(only=before, strict=False)

    def fitting(self) -> list[str]:
        return [v.patch_id for v in self.verdicts() if v.state is State.OK]

    def module_and_input(self) -> tuple[Any, Any]:
        """A module and its input, which compile with `fullgraph=True`; new ones at each call."""
        return _small_module()

    # -- the tests

    def test_every_patch_fits_or_says_why_not(self) -> None:
        verdicts = self.verdicts()
        assert verdicts, f"there is no patch of plugin {self.plugin!r}, ids {self.ids!r}"
        missing = set(self.ids or ()) - {v.patch_id for v in verdicts}
        assert not missing, f"unknown patches: {sorted(missing)}"
        for verdict in verdicts:
            assert verdict.state is State.OK or verdict.state in RESTING, str(verdict)

    def test_signs_can_be_searched(self, patch_id: str) -> None:
        """Their texts are compiled when a log is read first, long after the patch was loaded."""
        for wanted in self.fitting() if patch_id == "all" else [patch_id]:
            for sign in ENGINE.catalog().patches[wanted].patch.signs:
                assert sign.pattern.pattern == sign.text

    def test_applied_twice_and_taken_away_everything_is_as_it_was(self, patch_id: str) -> None:
        torchcompat.apply(only=[patch_id])
        changed = places()
        torchcompat.unapply()
        before = [value_of(place) for place in changed]
        for _ in range(2):
            report = torchcompat.apply(only=[patch_id])
            assert all(v.state in (State.APPLIED, *RESTING) for v in report), str(report)
            ours = [value_of(place) for place in changed]
            assert torchcompat.apply(only=[patch_id])[patch_id].state is State.APPLIED
            assert all(a is b for a, b in zip(ours, map(value_of, changed), strict=True))
            torchcompat.unapply()
            for place, was in zip(changed, before, strict=True):
                assert value_of(place) is was, place

    def test_nothing_shows_from_outside(self, patch_id: str) -> None:
        torchcompat.apply(only=[patch_id])
        seen = [pair for slot in ENGINE.slots() for pair in _what_shows(slot)]
        looks = [look(after) for _, after in seen]
        torchcompat.unapply()
        for (before, _), after in zip(seen, looks, strict=True):
            assert look(before) == after

    def test_a_failure_at_any_place_leaves_nothing(self, patch_id: str) -> None:
        torchcompat.apply(only=[patch_id])
        changed = places()
        torchcompat.unapply()
        patch = ENGINE.registered(patch_id).patch
        if patch.requires:
            torchcompat.apply(only=list(patch.requires))
        kept = len(ENGINE.slots())
        before = [value_of(place) for place in changed]
        for fail_at in range(sum(len(edit.build()) for edit in patch.edits)):
            with failing(patch.edits, fail_at) as made:
                found = torchcompat.apply(only=[patch_id], strict=False)[patch_id]
            assert made() > fail_at
            assert found.state is State.FAILED, (fail_at, found)
            assert "injected" in found.reason
            assert len(ENGINE.slots()) == kept
            assert all(value_of(p) is was for p, was in zip(changed, before, strict=True)), fail_at
        assert torchcompat.apply(only=[patch_id])[patch_id].state is State.APPLIED

    def test_compiled_equals_eager_before_with_and_after(self, patch_id: str, backend: str) -> None:
        torch = _torch()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = self.module_and_input()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        wanted = model(x)
        torch.testing.assert_close(compiled(x), wanted)
        torchcompat.apply(only=self.fitting() if patch_id == "all" else [patch_id])
        fresh = torch.compile(self.module_and_input()[0], backend=backend, fullgraph=True)
        for function in (compiled, fresh):
            inner = function._orig_mod
            torch.testing.assert_close(function(x), inner(x))
            function(x).sum().backward()
        torchcompat.unapply()
        torch.testing.assert_close(compiled(x), wanted)

    test_compiled_equals_eager_before_with_and_after.also_all = True  # type: ignore[attr-defined]

    def test_apply_and_unapply_race_with_compiled_calls(self) -> None:
        torch = _torch()
        ids = self.fitting()
        model, x = self.module_and_input()
        compiled = torch.compile(model, backend="eager")
        wanted = compiled(x)
        stop = threading.Event()

        def call() -> None:
            while not stop.is_set():
                torch.testing.assert_close(compiled(x), wanted)

        def switch() -> None:
            for _ in range(6):
                torchcompat.apply(only=ids, strict=False)
                torchcompat.unapply()

        callers, switchers = (
            [_Racer(call, stop) for _ in "ab"],
            [_Racer(switch, stop) for _ in "ab"],
        )
        for racer in switchers:
            racer.end(4 * WAIT_S)
        stop.set()
        for racer in callers:
            racer.end(WAIT_S)
        torchcompat.unapply()
        assert not ENGINE.slots()

    def test_orders_of_import_apply_and_unapply(self, order: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, order, " ".join(self.fitting())],
            env=child_environ(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.strip().endswith("right"), done.stderr[-2000:]

    def test_the_program_shows_the_fault_without_the_patch_only(self, patch_id: str) -> None:
        try:
            proof = prove(ENGINE.registered(patch_id))
        except ConfigError as e:
            pytest.fail(f"{e}: a patch proves its fault", pytrace=False)
        if proof.outcome == NOT_HERE:
            pytest.skip(proof.unpatched.text)
        assert proof.outcome == FIXED_BY_US, proof


def _is_of(patch_id: str, plugin: str | None) -> bool:
    """`builtin` are torchcompat's own, whose ids have no prefix; a broken plugin is its name."""
    if plugin is None:
        return True
    prefix, colon, _ = patch_id.partition(":")
    return (not colon and prefix != plugin) if plugin == "builtin" else prefix == plugin


def _torch() -> Any:
    """Not at the head of this module, whose import a collection alone must not pay for. `Any`: much
    of what is used here torch does not annotate."""
    return importlib.import_module("torch")


class _Racer:
    """A started thread; `end` waits, bounded, and raises what it raised."""

    def __init__(self, work: Callable[[], None], stop: threading.Event) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in `end`
                self._error = error
                stop.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "thread stuck"
        if self._error is not None:
            raise self._error


def places() -> list[tuple[Any, ...]]:
    """(what, where, name) of everything that is changed now: to be compared by identity."""
    found: list[tuple[Any, ...]] = []
    for slot in ENGINE.slots():
        if isinstance(slot, CodeSlot):
            found.append(("code", slot.function))
        elif isinstance(slot, ModulePropertySlot):
            found.append(("class", slot.module))
        elif isinstance(slot, AttrSlot):
            found.append(("attribute", slot.owner, slot.attr))
    return found


def value_of(place: tuple[Any, ...]) -> Any:
    """What is at one of `places` now."""
    if place[0] == "code":
        return place[1].__code__
    if place[0] == "class":
        return type(place[1])
    return own_attribute(place[1], place[2])


def _what_shows(slot: Slot) -> list[tuple[Any, Any]]:
    """(before, after) of the functions and classes that people can look at."""
    if isinstance(slot, CodeSlot):
        return [(slot.function, slot.function)]
    if not isinstance(slot, AttrSlot) or slot.before is None:
        return []
    before, after = unbind(slot.before)[0], unbind(slot.new)[0]
    home = sys.modules.get(getattr(before, "__module__", None) or "")
    if isinstance(slot.owner, ModuleType) and slot.owner is not home:
        return []  # a name that another module has imported: not where it is looked up
    shows = inspect.isfunction(before) or isinstance(before, type)
    return [(before, after)] if shows else []


def look(value: Any) -> tuple[Any, ...]:
    """How a function or class presents itself."""
    try:
        source: Any = inspect.getsource(value)
    except (OSError, TypeError):
        source = None
    names = tuple(getattr(value, n, None) for n in ("__module__", "__qualname__", "__doc__"))
    signature = str(inspect.signature(value)) if inspect.isfunction(value) else None
    by_name = None
    if "<locals>" not in value.__qualname__:
        try:
            by_name = pickle.loads(pickle.dumps(value)).__qualname__
        except (pickle.PicklingError, AttributeError):
            by_name = None
    return (*names, signature, by_name, copy.deepcopy(value) is value, source)


@contextmanager
def failing(edits: Sequence[Any], fail_at: int) -> Iterator[Callable[[], int]]:
    """While inside, the `fail_at`th slot that `edits` build raises when it is set. Gives a function
    that tells how many slots were built."""
    made = 0

    def over(real: Callable[[], list[Slot]]) -> Callable[[], list[Slot]]:
        def build() -> list[Slot]:
            nonlocal made
            slots = real()
            for slot in slots:
                if made == fail_at:
                    slot.set = _fail  # type: ignore[method-assign]
                made += 1
            return slots

        return build

    with ExitStack() as undo:
        for edit in edits:  # frozen, and shared with the engine: an attribute over the method
            object.__setattr__(edit, "build", over(edit.build))
            undo.callback(object.__delattr__, edit, "build")
        yield lambda: made


def _fail() -> None:
    raise OSError("injected")


def _small_module() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.layers(x) * torch.cond(
                x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)
            )

    return Small(), torch.randn(3, 4)
