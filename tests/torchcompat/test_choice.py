"""FirstOf: one fault, several places where releases of torch have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchcompat import FirstOf, Wrap
from torchcompat.install import set_all

Make = Callable[..., Any]


def test_the_first_that_exists_is_built(leaf: Any, wrap: Make) -> None:
    stock = leaf.compute
    edit = FirstOf(edits=(wrap("gone"), wrap("compute"), wrap("Box.get")))
    assert edit.inspect().kind == "ok"
    slots = edit.build()
    set_all(slots, [])
    assert leaf.compute(3) == ("new", 3) and leaf.Box().get(1) == ("stock", 1)
    slots[0].undo()
    assert leaf.compute is stock


def test_a_drifted_form_is_not_passed_over(leaf: Any, wrap: Make) -> None:
    drifted = Wrap(target=wrap("compute").target, factory=lambda f: f, anchors=("not in there",))
    assert FirstOf(edits=(drifted, wrap("Box.get"))).inspect().kind == "drifted"


def test_nothing_there_is_missing(wrap: Make) -> None:
    assert FirstOf(edits=(wrap("gone"), wrap("gone_too"))).inspect().kind == "missing"


def test_modules_are_those_of_all_forms() -> None:
    edits = tuple(Wrap(target=t, factory=lambda f: f) for t in ("a:x", "b:x", "a:y"))
    assert FirstOf(edits=edits).modules == ("a", "b")
    with pytest.raises(ValueError, match="at least two"):
        FirstOf(edits=edits[:1])
