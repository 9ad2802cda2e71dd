"""Recognising code by parameter names, source text and hash; naming it by target."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest

from torchcompat import source
from torchcompat.errors import TargetNotFound
from torchcompat.target import MISSING, Target, own_attribute, unbind


def test_digest_ignores_indentation_and_trailing_blanks(lib: Any) -> None:
    plain = lib.write("plain", "def f(x):\n    if x:\n        return 1\n    return 2\n")
    deep = lib.write(
        "deep",
        "class C:\n    def f(x):   \n        if x:\t\n            return 1\n        return 2\n",
    )
    text = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert source.digest(lib.load(plain.rpartition(".")[2]).f) == expected
    assert source.digest(lib.load(deep.rpartition(".")[2]).C.f) == expected


def test_drift(leaf: Any) -> None:
    compute, sha = leaf.compute, source.digest(leaf.compute)
    assert source.drift(compute, ("x", "scale"), ("x * scale",)) is None
    assert source.drift(compute, ("x",), ()) == "takes (x, scale), not (x)"
    assert source.drift(compute, None, ("x + scale",)) == "no longer contains 'x + scale'"
    assert source.drift(compute, None, (), {sha: "2.13"}) is None
    assert source.drift(compute, None, (), {"0": "2.13"}) == f"has unknown source {sha}"
    assert source.drift(compute, None, ("x * scale",), {"0": "2.13"}) is None
    assert source.drift(len, None, ("x",)) == "has no readable source"


def test_wrappers_are_seen_through(leaf: Any) -> None:
    @functools.wraps(leaf.compute)
    def wrapper(*args: Any) -> Any:
        return None

    assert source.drift(wrapper, ("x", "scale"), ("x * scale",)) is None


@pytest.mark.parametrize("text", ["torch", "torch:", ":f", "torch:a..b", "torch:f()", "a b:c"])
def test_a_target_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        Target.parse(text)


def test_resolve(lib: Any, leaf: Any) -> None:
    assert Target.parse(lib.target("compute")).resolve() == (leaf, "compute", leaf.compute)
    owner, name, raw = Target.parse(lib.target("Box.make")).resolve()
    assert (owner, name) == (leaf.Box, "make")
    assert isinstance(raw, staticmethod)
    owner, _, raw = Target.parse(lib.target("SmallBox.get")).resolve()
    assert owner is leaf.SmallBox
    assert raw is vars(leaf.Box)["get"]
    assert own_attribute(owner, "get") is MISSING


@pytest.mark.parametrize("path", ["compuet", "Box.gte", "Bxo.get"])
def test_what_does_not_exist_is_named_with_the_nearest(lib: Any, leaf: Any, path: str) -> None:
    with pytest.raises(TargetNotFound, match=r"does not exist in this torch.*did you mean"):
        Target.parse(lib.target(path)).resolve()


def test_a_module_that_is_not_imported_is_not_imported(lib: Any) -> None:
    with pytest.raises(TargetNotFound, match="is not imported"):
        Target.parse(lib.target("compute")).resolve()


@pytest.mark.parametrize("name", ["get", "make", "build", "size"])
def test_unbind_dresses_alike(leaf: Any, name: str) -> None:
    raw = vars(leaf.Box)[name]
    inner, dress = unbind(raw)
    assert type(dress(inner)) is type(raw)
    assert callable(inner)
