"""Slots: what is changed, what comes back; wrappers: what they look like from outside."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from types import ModuleType
from typing import Any

import pytest
import wrapt

from torchcompat.errors import PatchConflict, PatchError
from torchcompat.install import (
    AttrSlot,
    CodeSlot,
    ModulePropertySlot,
    Slot,
    Stale,
    finish_wrapper,
    set_all,
    stale_aliases,
    take_out,
)


def wrapped(original: Any, label: str = "new") -> Any:
    return finish_wrapper(lambda *a, **k: (label, original(*a, **k)), original, "p")


def installed(owner: Any, attr: str) -> AttrSlot:
    slot = AttrSlot(owner, attr, wrapped(getattr(owner, attr)))
    slot.set()
    return slot


def test_a_wrapper_looks_like_the_original(leaf: Any) -> None:
    original = leaf.compute
    original.mark = "Dynamo's"
    slot = installed(leaf, "compute")
    new = leaf.compute
    assert new(2, scale=3) == ("new", 6)
    assert type(new) is type(original)
    assert pickle.loads(pickle.dumps(new)) is new
    assert copy.deepcopy(new) is new
    assert inspect.signature(new) == inspect.signature(original)
    assert inspect.getsource(new) == inspect.getsource(original)
    assert (new.__name__, new.__qualname__, new.__module__) == ("compute", "compute", leaf.__name__)
    assert (new.__doc__, new.__wrapped__) == ("Multiply.", original)
    assert new.__torchcompat__ == "p"
    assert not hasattr(new, "mark"), "the original's __dict__ is not to be copied"
    assert slot.undo() == "restored"
    assert leaf.compute is original


def test_a_method_can_be_pickled(leaf: Any) -> None:
    installed(leaf.Box, "get")
    method = pickle.loads(pickle.dumps(leaf.Box().get))
    assert method(1) == ("new", ("stock", 1))


def test_a_replaced_class_keeps_the_name_and_the_source(leaf: Any) -> None:
    original = leaf.Box
    new = finish_wrapper(type("Other", (original,), {}), original, "p")
    slot = AttrSlot(leaf, "Box", new)
    slot.set()
    assert repr(leaf.Box) == repr(original)
    assert inspect.getsource(leaf.Box) == inspect.getsource(original)
    assert type(pickle.loads(pickle.dumps(leaf.Box()))) is new
    slot.undo()
    assert leaf.Box is original


@pytest.mark.parametrize(
    ("new", "original"), [(len, int), (int, int), (int, len), (3, len), (len, 3)]
)
def test_what_cannot_stand_for_the_other(new: Any, original: Any) -> None:
    with pytest.raises(PatchError, match="can only be"):
        finish_wrapper(new, original, "p")


def test_an_inherited_attribute_is_shadowed_and_comes_back(leaf: Any) -> None:
    slot = installed(leaf.SmallBox, "get")
    assert slot.created
    assert leaf.SmallBox().get(1) == ("new", ("stock", 1))
    assert leaf.Box().get(1) == ("stock", 1)
    slot.undo()
    assert "get" not in vars(leaf.SmallBox)


def test_a_created_name_is_deleted(leaf: Any) -> None:
    slot = AttrSlot(leaf, "BRAND_NEW", 1)
    slot.set()
    assert leaf.BRAND_NEW == 1
    slot.undo()
    assert not hasattr(leaf, "BRAND_NEW")


def test_a_slot_made_for_another_value_is_stale(leaf: Any) -> None:
    attr = AttrSlot(leaf, "FLAG", "ours")
    code = CodeSlot(leaf.compute, (lambda x, scale=1: 0).__code__)
    leaf.FLAG = "theirs"
    leaf.compute.__code__ = (lambda x, scale=1: 1).__code__
    for slot in (attr, code):
        with pytest.raises(Stale):
            slot.set()
    assert leaf.FLAG == "theirs"
    assert leaf.compute(5) == 1


def test_under_a_plain_wrapper_ours_turns_inert(leaf: Any) -> None:
    slot = installed(leaf, "compute")
    ours = leaf.compute
    leaf.compute = functools.wraps(ours)(lambda *a: ["theirs", ours(*a)])
    assert leaf.compute(2) == ["theirs", ("new", 2)]
    assert slot.is_effective()
    assert slot.undo() == "displaced"
    assert leaf.compute(2) == ["theirs", 2]


@pytest.mark.parametrize("name", ["get", "make", "build"])
def test_from_under_a_wrapt_wrapper_ours_is_taken_out(leaf: Any, name: str) -> None:
    stock = getattr(leaf.Box(), name)(1)
    raw = vars(leaf.Box)[name]
    inner = raw.__func__ if name != "get" else raw
    new = wrapped(inner)
    slot = AttrSlot(leaf.Box, name, type(raw)(new) if name != "get" else new)
    slot.set()
    for _ in range(2):  # under more than one
        wrapt.wrap_function_wrapper(leaf.Box, name, lambda f, _, a, k: ["theirs", f(*a, **k)])
    assert getattr(leaf.Box(), name)(1) == ["theirs", ["theirs", ("new", stock)]]
    assert slot.undo() == "restored"
    assert getattr(leaf.Box(), name)(1) == ["theirs", ["theirs", stock]]
    assert vars(leaf.Box)[name].__wrapped__.__wrapped__ is raw


def test_replaced_altogether(leaf: Any) -> None:
    slot = installed(leaf, "compute")
    leaf.compute = other = lambda x: "other"
    assert not slot.is_effective()
    assert slot.undo() == "displaced"
    assert leaf.compute is other


@pytest.mark.parametrize("first", [0, 1])
def test_two_of_ours_on_one_place_in_any_order(leaf: Any, first: int) -> None:
    original = leaf.compute
    slots: list[Slot] = [installed(leaf, "compute"), installed(leaf, "compute")]
    assert leaf.compute(2) == ("new", ("new", 2))
    gone = slots.pop(first)
    assert take_out(gone, slots) is None
    assert leaf.compute(2) == ("new", 2)
    assert take_out(slots[0], []) is None
    assert leaf.compute is original


def test_code_keeps_identity_and_reaches_aliases(leaf: Any) -> None:
    alias, code = leaf.compute, leaf.compute.__code__
    slot = CodeSlot(leaf.compute, (lambda x, scale=1: "new").__code__)
    slot.set()
    assert alias is leaf.compute
    assert alias(1) == "new"
    with pytest.raises(PatchConflict, match="another patch has rewritten compute"):
        CodeSlot(leaf.compute, code).check_free([slot])
    assert slot.undo() == "restored"
    assert alias.__code__ is code


def test_a_module_property_is_for_others_only(leaf: Any) -> None:
    plain = type(leaf)
    store = {"FLAG": "thread", "other": 2}
    slots = [
        ModulePropertySlot(
            leaf,
            name,
            property(lambda _, n=name: store[n], lambda _, v, n=name: store.__setitem__(n, v)),
        )
        for name in store
    ]
    for slot in slots:
        slot.set()
    assert (leaf.FLAG, leaf.other) == ("thread", 2)
    leaf.FLAG = "written"
    assert store["FLAG"] == "written"
    assert leaf.via_flag() == "stock", "the module's own functions see its dict"
    assert type(leaf).__mro__[1] is plain, "one class for both"
    with pytest.raises(PatchConflict, match="FLAG"):
        ModulePropertySlot(leaf, "FLAG", property()).set()
    assert slots[0].undo() == "restored"
    assert (leaf.FLAG, leaf.other) == ("stock", 2)
    assert slots[1].undo() == "restored"
    assert type(leaf) is plain
    assert slots[1].undo() == "displaced"


def test_set_all_or_nothing(leaf: Any) -> None:
    before = dict(vars(leaf))

    class Broken(AttrSlot):
        def set(self) -> None:
            raise RuntimeError("no")

    good = [AttrSlot(leaf, "FLAG", 1), AttrSlot(leaf, "extra", 2), Broken(leaf, "compute", 3)]
    with pytest.raises(RuntimeError, match="no"):
        set_all(good, [])
    assert vars(leaf) == before


def test_names_that_still_mean_the_original(leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    user = ModuleType("torch.user")
    user.calc = leaf.compute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.user", user)
    slot = AttrSlot(leaf, "compute", wrapped(leaf.compute))
    assert stale_aliases([slot]) == [
        (slot, f"torch.user.calc still is the original of {leaf.__name__}:compute")
    ]
