"""The vocabulary patches are written in: a `Patch` and its `Edit`s."""

from __future__ import annotations

import functools
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat import source
from torchcompat.build import parse_bounds
from torchcompat.errors import PatchError, SourceDrift, TargetNotFound
from torchcompat.install import AttrSlot, CodeSlot, Slot, Stale, finish_wrapper, patch_being_built
from torchcompat.sign import Sign, check_signs
from torchcompat.target import MISSING, Target, own_attribute, unbind
from torchcompat.verdict import Finding

_ID: Final = re.compile(r"([A-Za-z0-9_.-]+:)?[a-z][a-z0-9_]*")


class Edit(ABC):
    """One change to torch. `inspect` only looks, `build` only makes; the engine does the rest.

    Edits and patches are compared by identity: they hold functions, and a dataclass that compares
    takes half as long again to make, at every start.
    """

    @property
    @abstractmethod
    def modules(self) -> tuple[str, ...]:
        """The modules that must be imported before the edit can be judged and installed."""

    @abstractmethod
    def inspect(self) -> Finding:
        """Whether the loaded torch has what this edit changes, as it knows it."""

    @abstractmethod
    def build(self) -> list[Slot]:
        """All new objects, in slots not yet set. May raise `SourceDrift` or `TargetNotFound`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _TargetEdit(Edit):
    """What the edits with one named target share."""

    target: str

    def __post_init__(self) -> None:
        Target.parse(self.target)

    @property
    def place(self) -> Target:
        return Target.parse(self.target)

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.place.module,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Wrap(_TargetEdit):
    """Put `factory(original)` in the target's place.

    `factory` gets the function inside a staticmethod, classmethod or property, and its result is
    dressed alike. `signature` (parameter names) and `anchors` (texts in the source) say what the
    target must look like.
    """

    factory: Callable[[Any], Any]
    signature: tuple[str, ...] | None = None
    anchors: tuple[str, ...] = ()

    def _drift(self, original: Any) -> str | None:
        return source.drift(original, self.signature, self.anchors)

    def inspect(self) -> Finding:
        try:
            _, _, raw = self.place.resolve()
        except TargetNotFound as e:
            return Finding("missing", str(e))
        original = unbind(raw)[0]
        if not callable(original):
            return Finding("drifted", f"{self.target} is {type(raw).__name__}, nothing callable")
        problem = self._drift(_behind_ours(original))
        if problem is not None:
            return Finding("drifted", f"{self.target} {problem}")
        return Finding("ok", f"{self.target} is as the patch knows it", (f"found {self.target}",))

    def build(self) -> list[Slot]:
        owner, name, raw = self.place.resolve()
        original, dress = unbind(raw)
        new = finish_wrapper(self.factory(original), original, patch_being_built())
        slot = AttrSlot(owner, name, dress(new))
        if slot.before is not MISSING and slot.before is not raw:
            raise Stale(self.target)
        return [slot]


@dataclass(frozen=True, kw_only=True, eq=False)
class Replace(Wrap):
    """Like `Wrap`, for a factory that does not call the original: judged by source, so `anchors`
    or `hashes` ({digest: torch version}) are required."""

    hashes: dict[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.anchors and not self.hashes:
            raise ValueError(f"Replace of {self.target} needs anchors or hashes to know its source")

    def _drift(self, original: Any) -> str | None:
        return source.drift(original, self.signature, self.anchors, self.hashes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Value(_TargetEdit):
    """Set a module's or class's attribute to `factory(current)`; `create` if there may be none,
    then `factory` gets `MISSING`."""

    factory: Callable[[Any], Any]
    create: bool = False

    def inspect(self) -> Finding:
        try:
            self.place.owner() if self.create else self.place.resolve()
        except TargetNotFound as e:
            return Finding("missing", str(e))
        return Finding("ok", f"{self.target} is there" if not self.create else "may be created")

    def build(self) -> list[Slot]:
        owner, name = self.place.owner(), self.place.path[-1]
        before = own_attribute(owner, name)
        return [AttrSlot(owner, name, self.factory(before))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Code(_TargetEdit):
    """Give the function itself other code: everybody who holds it, also by another name or in a
    closure, runs the new one. The free variables must be the same."""

    factory: Callable[[FunctionType], CodeType]
    signature: tuple[str, ...] | None = None
    anchors: tuple[str, ...] = ()

    def _function(self) -> FunctionType:
        """The function with the target's source, inside decorators such as contextmanager."""
        _, _, raw = self.place.resolve()
        function = inspect.unwrap(unbind(raw)[0])
        if not isinstance(function, FunctionType):
            raise SourceDrift(f"{self.target} is {type(function).__name__}, not a Python function")
        return function

    def inspect(self) -> Finding:
        try:
            problem = source.drift(self._function(), self.signature, self.anchors)
        except TargetNotFound as e:
            return Finding("missing", str(e))
        except SourceDrift as e:
            return Finding("drifted", str(e))
        if problem is not None:
            return Finding("drifted", f"{self.target} {problem}")
        return Finding("ok", f"{self.target} is as the patch knows it", (f"found {self.target}",))

    def build(self) -> list[Slot]:
        function = self._function()
        code = self.factory(function)
        if code.co_freevars != function.__code__.co_freevars:
            raise PatchError(
                f"new code for {self.target} has free variables {code.co_freevars}, "
                f"the function has {function.__code__.co_freevars}"
            )
        return [CodeSlot(function, code)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Patch:
    """One hazard of torch and what mends it.

    `affects` bounds the versions (see `build.parse_bounds`); they decide on releases and only
    narrow elsewhere. `recognise` probes the loaded modules for the fault itself, beyond what the
    edits look at. `repro` is a program inside the package that brings the patch: exit status 0 is
    right, 1 faulty, 2 does not apply here. `signs` say how the hazard shows in logs. Raises
    `ValueError` where a field cannot be right.
    """

    id: str
    title: str
    why: str
    affects: str
    edits: tuple[Edit, ...]
    fixed_in: str | None = None
    recognise: Callable[[], Finding] | None = None
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    repro: str | None = None
    links: tuple[str, ...] = ()
    opt_in: bool = False
    signs: tuple[Sign, ...] = ()

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"patch id {self.id!r}: lower case, digits and _, after 'plugin:'")
        if not self.edits or not all(isinstance(e, Edit) for e in self.edits):
            raise ValueError(f"patch {self.id!r}: edits must be a non-empty tuple of Edit")
        try:
            parse_bounds(self.affects)
        except ValueError as e:
            raise ValueError(f"patch {self.id!r}: {e}") from None
        path = PurePosixPath(self.repro or "x.py")
        if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
            raise ValueError(f"patch {self.id!r}: repro {self.repro!r} is no .py file of a package")
        check_signs(f"patch {self.id!r}", self.signs)

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """Everything that must be imported before the patch can be judged."""
        return tuple(dict.fromkeys(name for edit in self.edits for name in edit.modules))


def _behind_ours(value: Any) -> Any:
    """What our replaced classes stand for; functions are seen through by `inspect` itself."""
    while isinstance(value, type) and "__torchcompat_original__" in vars(value):
        value = vars(value)["__torchcompat_original__"]
    return value
