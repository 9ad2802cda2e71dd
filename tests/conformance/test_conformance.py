"""What holds for every patch: whole or not at all, exact undoing, nothing to see from outside."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchcompat
from torchcompat.engine import ENGINE
from torchcompat.install import AttrSlot, CodeSlot, ModulePropertySlot
from torchcompat.target import own_attribute, unbind
from torchcompat.verdict import State

WAIT_S = 30.0


def _load_everything() -> None:
    for verdict in torchcompat.plan():
        for name in ENGINE.registered(verdict.patch_id).patch.modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:  # triton, on a machine without it
                break


_load_everything()
IDS = [v.patch_id for v in torchcompat.plan() if v.state is State.OK]
SKIPPED = {State.FIXED, State.NOT_AFFECTED, State.PENDING}


@pytest.fixture(autouse=True)
def _stock_torch() -> Iterator[None]:
    torchcompat.unapply()
    yield
    torchcompat.unapply()
    torch._dynamo.reset()


def test_every_patch_fits_this_torch_or_says_why_not() -> None:
    for verdict in torchcompat.plan():
        assert verdict.state is State.OK or verdict.state in SKIPPED, str(verdict)


def places() -> list[tuple[Any, ...]]:
    """(what, where, object) of everything that is changed now: to be compared by identity."""
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
    if place[0] == "code":
        return place[1].__code__
    if place[0] == "class":
        return type(place[1])
    return own_attribute(place[1], place[2])


@pytest.mark.parametrize("patch_id", IDS)
def test_applied_twice_and_taken_away_everything_is_as_it_was(patch_id: str) -> None:
    torchcompat.apply(only=[patch_id])
    changed = places()
    torchcompat.unapply()
    before = [value_of(place) for place in changed]
    for _ in range(2):
        report = torchcompat.apply(only=[patch_id])
        assert all(v.state is State.APPLIED for v in report)
        ours = [value_of(place) for place in changed]
        assert torchcompat.apply(only=[patch_id])[patch_id].state is State.APPLIED
        assert all(a is b for a, b in zip(ours, map(value_of, changed), strict=True))
        torchcompat.unapply()
        for place, was in zip(changed, before, strict=True):
            assert value_of(place) is was, place


@pytest.mark.parametrize("patch_id", IDS)
def test_nothing_shows_from_outside(patch_id: str) -> None:
    torchcompat.apply(only=[patch_id])
    seen = []
    for slot in ENGINE.slots():
        if isinstance(slot, CodeSlot):
            seen.append((slot.function, slot.function))
        elif isinstance(slot, AttrSlot) and slot.before is not None:
            before, after = unbind(slot.before)[0], unbind(slot.new)[0]
            home = sys.modules.get(getattr(before, "__module__", None) or "")
            if isinstance(slot.owner, ModuleType) and slot.owner is not home:
                continue  # a name that another module has imported: not where it is looked up
            if inspect.isfunction(before) or isinstance(before, type):
                seen.append((before, after))
    looks = [look(after) for _, after in seen]
    torchcompat.unapply()
    for (before, _), after in zip(seen, looks, strict=True):
        assert look(before) == after


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
    copied = copy.deepcopy(value) is value
    return (*names, signature, by_name, copied, source)


@pytest.mark.parametrize("patch_id", IDS)
def test_a_failure_at_any_place_leaves_nothing(
    patch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchcompat.apply(only=[patch_id])
    requires = ENGINE.registered(patch_id).patch.requires
    changed = places()
    torchcompat.unapply()
    if requires:
        torchcompat.apply(only=list(requires))
    kept = len(ENGINE.slots())
    before = [value_of(place) for place in changed]
    edits = ENGINE.registered(patch_id).patch.edits
    total = sum(len(edit.build()) for edit in edits)
    for fail_at in range(total):
        made = 0

        def build(real: Any, fail_at: int = fail_at) -> Any:
            def failing() -> Any:
                nonlocal made
                slots = real()
                for slot in slots:
                    if made == fail_at:
                        monkeypatch.setattr(slot, "set", _fail, raising=False)
                    made += 1
                return slots

            return failing

        with monkeypatch.context() as patch:
            for edit in edits:
                patch.setattr(type(edit), "build", _dispatch(edits, build), raising=True)
                break
            found = torchcompat.apply(only=[patch_id], strict=False)[patch_id]
        if made <= fail_at:
            continue
        assert found.state is State.FAILED, (fail_at, found)
        assert len(ENGINE.slots()) == kept
        assert all(value_of(p) is was for p, was in zip(changed, before, strict=True)), fail_at
    assert torchcompat.apply(only=[patch_id])[patch_id].state is State.APPLIED


def _fail() -> None:
    raise OSError("injected")


def _dispatch(edits: tuple[Any, ...], wrap: Any) -> Any:
    """`build` for the class of the first edit that fails where `wrap` says."""
    cls = type(edits[0])
    real = cls.build

    def build(self: Any) -> Any:
        return wrap(lambda: real(self))()

    return build


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) * torch.cond(
            x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("patch_id", [*IDS, "all"])
def test_compiled_equals_eager_before_with_and_after(patch_id: str, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Small(), torch.randn(3, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    wanted = model(x)
    torch.testing.assert_close(compiled(x), wanted)
    torchcompat.apply(only=None if patch_id == "all" else [patch_id])
    for function in (compiled, torch.compile(Small(), backend=backend, fullgraph=True)):
        inner: Any = function._orig_mod
        torch.testing.assert_close(function(x), inner(x))
        function(x).sum().backward()
    torchcompat.unapply()
    torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.parametrize("patch_id", ["all"])
def test_apply_and_unapply_race_with_compiled_calls(patch_id: str) -> None:
    model, x = Small(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager")
    wanted = compiled(x)
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def call() -> None:
        while not stop.is_set():
            torch.testing.assert_close(compiled(x), wanted)

    def switch() -> None:
        for _ in range(6):
            torchcompat.apply()
            torchcompat.unapply()

    callers = [guarded(call) for _ in range(2)]
    switchers = [guarded(switch) for _ in range(2)]
    for thread in switchers:
        thread.join(120)
        assert not thread.is_alive()
    stop.set()
    for thread in callers:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not errors, errors
    torchcompat.unapply()
    assert not ENGINE.slots()


ORDERS = [
    "torch apply compile unapply compile",
    "apply torch compile unapply compile",
    "apply apply torch compile apply compile",
    "torch compile apply compile unapply apply compile",
    "apply unapply torch compile",
    "apply unapply torch apply compile unapply compile",
]


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_import_apply_and_unapply(order: str) -> None:
    program = """
import sys
import torchcompat
for step in sys.argv[1].split():
    if step == "torch":
        import torch
    elif step == "compile":
        x = torch.ones(3)
        f = torch.compile(lambda y: y.sin() + len(sys.argv), backend="eager", fullgraph=True)
        assert torch.equal(f(x), x.sin() + 2)
    elif step == "apply":
        assert not torchcompat.apply().findings
    else:
        torchcompat.unapply()
states = {v.state.value for v in torchcompat.status()}
assert states <= {"applied", "pending", "fixed", "not_affected", "ok", "disabled"}, states
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, order],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip().endswith("right"), done.stderr[-2000:]
