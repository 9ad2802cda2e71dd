"""Recognising code by parameter names, source text and hash; naming it by target."""

from __future__ import annotations

import functools
import hashlib
import inspect
import textwrap
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


SAMPLE = '''
import functools

def deco(f):
    return f

@deco
@functools.lru_cache(
    maxsize=3,
)
def decorated(
    a,
) -> int:
    """Text
at the margin."""
    inner = 1  # comment
    return inner

    # a comment at the end
def neighbour():
    return "next door"

class Plain:
    attribute = 1

    async def method(self):
        return [
            2,
        ]

@deco
class Decorated:
    attribute = 3

class Twice:
    attribute = 4

class Twice:
    attribute = 5

    class Nested:
        attribute = 6

short = lambda: (
    7
)
'''


@pytest.fixture
def sample(lib):
    return lib.load(lib.write("sample", SAMPLE).rpartition(".")[2])


def _samples(module):
    named = [module.decorated, module.neighbour, module.Plain, module.Plain.method, module.short]
    return [*named, module.deco, module.Decorated, module.Twice, module.Twice.Nested]


def test_text_is_what_inspect_gives(sample):
    for value in _samples(sample):
        stock = inspect.getsource(inspect.unwrap(value)).splitlines()
        expected = textwrap.dedent("\n".join(line.rstrip() for line in stock)).strip("\n") + "\n"
        assert source.text(value) == expected, value


def test_an_anchor_is_looked_for_in_the_whole_and_nowhere_else(sample):
    for value in _samples(sample):
        for line in (source.text(value) or "").splitlines():
            assert source.drift(value, None, (line,)) is None, (value, line)
    assert "no longer contains" in source.drift(sample.decorated, None, ("next door",))
    assert "no longer contains" in source.drift(sample.Plain, None, ("attribute = 3",))
    assert "no longer contains" in source.drift(sample.Plain.method, None, ("@deco",))


def test_a_plain_source_is_read_without_a_tokenizer(sample, monkeypatch):
    """Without `inspect`'s searches for the module and for the end: torch is being imported."""
    monkeypatch.setattr(inspect, "getblock", None)
    monkeypatch.setattr(inspect, "getsourcelines", None)
    assert source.drift(sample.Plain, None, ("return [", "attribute = 1")) is None
    assert source.drift(sample.neighbour, (), ("next door",)) is None
