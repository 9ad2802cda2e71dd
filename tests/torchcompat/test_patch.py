"""The vocabulary: what a patch may say, what each kind of edit finds and makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest

from torchcompat import MISSING, Code, Edit, Finding, Patch, Replace, SourceDrift, Value, Wrap
from torchcompat.errors import PatchError
from torchcompat.install import Slot, Stale, set_all

Make = Callable[..., Any]


def install(edit: Edit) -> list[Slot]:
    assert edit.inspect().kind == "ok", edit.inspect()
    slots = edit.build()
    set_all(slots, [])
    return slots


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "Has Space"}, "patch id 'Has Space'"),
        ({"edits": ()}, "non-empty tuple of Edit"),
        ({"edits": ("torch:x",)}, "non-empty tuple of Edit"),
        ({"affects": "<2.14"}, "write '<2.14.dev0'"),
        ({"repro": "/repro/x.py"}, "no .py file of a package"),
        ({"repro": "../x.py"}, "no .py file of a package"),
        ({"repro": "x.sh"}, "no .py file of a package"),
    ],
)
def test_a_patch_that_cannot_be_right(fields: dict[str, Any], message: str) -> None:
    edit = Wrap(target="torch:x", factory=lambda f: f)
    good: dict[str, Any] = {
        "id": "p",
        "title": "t",
        "why": "w",
        "affects": ">=2.6.0.dev0",
        "edits": (edit,),
    }
    Patch(**good)
    with pytest.raises(ValueError, match=message):
        Patch(**{**good, **fields})


def test_an_edit_that_cannot_be_right() -> None:
    with pytest.raises(ValueError, match="not of the form"):
        Wrap(target="torch.x", factory=lambda f: f)
    with pytest.raises(ValueError, match="needs anchors or hashes"):
        Replace(target="torch:x", factory=lambda f: f)


def test_modules_of_a_patch_each_once_in_order(patch_of: Make) -> None:
    names = ["a:x", "b:x", "a:y"]
    patch = patch_of(*(Wrap(target=n, factory=lambda f: f) for n in names))
    assert patch.modules == ("a", "b")


@pytest.mark.parametrize(
    ("path", "call", "stock"),
    [
        ("compute", lambda leaf: leaf.compute(3), 3),
        ("Box.get", lambda leaf: leaf.Box().get(1), ("stock", 1)),
        ("Box.make", lambda leaf: leaf.Box.make(1), ("stock", 1)),
        ("Box.make", lambda leaf: leaf.SmallBox().make(1), ("stock", 1)),
        ("Box.build", lambda leaf: leaf.SmallBox.build(1), ("SmallBox", 1)),
        ("Box.size", lambda leaf: leaf.Box().size, 1),
        ("SmallBox.get", lambda leaf: leaf.SmallBox().get(1), ("stock", 1)),
    ],
)
def test_wrap(leaf: Any, wrap: Make, path: str, call: Make, stock: Any) -> None:
    assert call(leaf) == stock
    slots = install(wrap(path))
    assert call(leaf) == ("new", stock)
    slots[0].undo()
    assert call(leaf) == stock


def test_wrap_a_context_manager(lib: Any, leaf: Any) -> None:
    def factory(original: Any) -> Any:
        return lambda name: original(name.upper())

    install(Wrap(target=lib.target("scope"), factory=factory, signature=("name",)))
    with leaf.scope("a") as name:
        assert name == "A"


@pytest.mark.parametrize(
    ("fields", "kind", "reason"),
    [
        ({"signature": ("x", "scale")}, "ok", "is as the patch knows it"),
        ({"signature": ("x",)}, "drifted", "takes (x, scale), not (x)"),
        ({"anchors": ("x * scale",)}, "ok", "is as the patch knows it"),
        ({"anchors": ("x * scale", "gone")}, "drifted", "no longer contains 'gone'"),
        ({"path": "compuet"}, "missing", "did you mean 'compute'?"),
        ({"path": "FLAG"}, "drifted", "is str, nothing callable"),
    ],
)
def test_wrap_looks(leaf: Any, wrap: Make, fields: Any, kind: str, reason: str) -> None:
    finding = wrap(**fields).inspect()
    assert finding.kind == kind
    assert reason in finding.reason


def test_what_we_have_wrapped_is_still_recognised(leaf: Any, lib: Any, wrap: Make) -> None:
    install(wrap())
    install(wrap(signature=("x", "scale"), anchors=("x * scale",), label="second"))
    assert leaf.compute(3) == ("second", ("new", 3))
    make = lambda c: type("Other", (c,), {})  # noqa: E731
    edit = Replace(target=lib.target("Box"), factory=make, anchors=("def get(",))
    install(edit)
    install(edit)
    assert [c.__name__ for c in leaf.Box.__mro__] == ["Box", "Box", "Box", "object"]


def test_a_target_that_changes_while_the_factory_runs(lib: Any, leaf: Any) -> None:
    def factory(original: Any) -> Any:
        leaf.compute = lambda x: "theirs"
        return original

    with pytest.raises(Stale):
        Wrap(target=lib.target("compute"), factory=factory).build()


def test_replace_by_hash_or_anchor(lib: Any, leaf: Any) -> None:
    target, factory = lib.target("compute"), lambda f: lambda x: "new"
    unknown = Replace(target=target, factory=factory, hashes={"00": "2.1"}).inspect()
    assert (unknown.kind, "has unknown source" in unknown.reason) == ("drifted", True)
    sha = unknown.reason.split()[-1]
    install(Replace(target=target, factory=factory, hashes={"00": "2.1", sha: "2.2"}))
    assert leaf.compute(1) == "new"


def test_value(lib: Any, leaf: Any) -> None:
    slots = install(Value(target=lib.target("FLAG"), factory=lambda v: v + "!"))
    slots += install(Value(target=lib.target("NEW"), factory=lambda v: v is MISSING, create=True))
    assert (leaf.via_flag(), leaf.NEW) == ("stock!", True)
    for slot in slots:
        slot.undo()
    assert (leaf.FLAG, hasattr(leaf, "NEW")) == ("stock", False)
    assert Value(target=lib.target("GONE"), factory=lambda v: v).inspect().kind == "missing"


def renamed(function: FunctionType) -> CodeType:
    def compute(x: Any, scale: Any = 1) -> Any:
        return "new"

    return compute.__code__


def test_code(lib: Any, leaf: Any) -> None:
    alias = leaf.compute
    install(Code(target=lib.target("compute"), factory=renamed, signature=("x", "scale")))
    assert alias(1) == "new"


def test_code_of_a_decorated_function_is_the_one_inside(lib: Any, leaf: Any) -> None:
    def factory(function: FunctionType) -> CodeType:
        assert inspect.isgeneratorfunction(function)

        def scope(name: str) -> Any:
            yield name * 2

        return scope.__code__

    install(Code(target=lib.target("scope"), factory=factory, anchors=("yield name",)))
    with leaf.scope("a") as name:
        assert name == "aa"


def test_code_that_does_not_fit(lib: Any, leaf: Any) -> None:
    cell = 1

    def factory(function: FunctionType) -> CodeType:
        return (lambda x, scale=1: cell).__code__

    with pytest.raises(PatchError, match="free variables"):
        Code(target=lib.target("compute"), factory=factory).build()
    assert Code(target=lib.target("FLAG"), factory=renamed).inspect().kind == "drifted"
    assert Code(target=lib.target("gone"), factory=renamed).inspect().kind == "missing"
    with pytest.raises(SourceDrift, match="not a Python function"):
        Code(target=lib.target("FLAG"), factory=renamed).build()


def test_an_edit_of_ones_own(lib: Any, leaf: Any, patch_of: Make, engine_of: Make) -> None:
    class Nothing(Edit):
        modules = (lib.leaf_name,)

        def inspect(self) -> Finding:
            return Finding("ok", "nothing to see")

        def build(self) -> list[Slot]:
            return []

    report = engine_of(patch_of(Nothing())).apply(None, None)
    assert report["p"].state == "applied"
