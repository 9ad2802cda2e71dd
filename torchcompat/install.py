"""Slots: the smallest reversible changes to torch, and the wrappers that go into them.

A slot is made (everything new exists, nothing is changed), `set()` once and `undo()`ne once. The
engine calls both under its lock, so neither imports anything nor runs a patch's code.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, Literal

from torchcompat.errors import PatchConflict, PatchError
from torchcompat.target import MISSING, own_attribute, unbind

UndoState = Literal["restored", "displaced"]

_building: Final[ContextVar[str]] = ContextVar("torchcompat_building", default="")


@contextmanager
def building(patch_id: str) -> Iterator[None]:
    """While inside, the wrappers that edits build are marked with `patch_id`."""
    token = _building.set(patch_id)
    try:
        yield
    finally:
        _building.reset(token)


def patch_being_built() -> str:
    return _building.get()


class Stale(Exception):
    """Somebody changed the place between making a slot and setting it: judge and build again."""


class Switch:
    """Whether a wrapper does its work or passes calls straight to the original."""

    def __init__(self) -> None:
        self.on = True


def finish_wrapper(new: Any, original: Any, patch_id: str) -> Any:
    """The object to install for `new`, which a patch's factory made in place of `original`.

    A function comes back inside a plain function that looks like `original`: never a proxy, which
    `torch.compile` would look through and trace the original instead, and never `original`'s
    `__dict__`, whose Dynamo marks would make torch take the wrapper for a compiled function.
    A class comes back itself, under the original's name. Raises `PatchError` for other things.
    """
    if isinstance(original, type):
        if not isinstance(new, type) or new is original:
            raise PatchError(f"class {original.__qualname__} can only be replaced by another class")
        for name in ("__module__", "__name__", "__qualname__"):
            setattr(new, name, getattr(original, name))
        if "__firstlineno__" in vars(original):  # 3.13+: where inspect looks for the source
            new.__firstlineno__ = original.__firstlineno__  # type: ignore[attr-defined]
        new.__torchcompat__ = patch_id  # type: ignore[attr-defined]
        new.__torchcompat_original__ = original  # type: ignore[attr-defined]
        return new
    if not callable(original) or not callable(new) or isinstance(new, type):
        raise PatchError(f"{original!r} can only be wrapped by a function, not by {new!r}")
    switch = Switch()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs) if switch.on else original(*args, **kwargs)

    functools.update_wrapper(wrapper, original, updated=())
    wrapper.__torchcompat__ = patch_id  # type: ignore[attr-defined]
    wrapper.__torchcompat_switch__ = switch  # type: ignore[attr-defined]
    return wrapper


class Slot(ABC):
    """One place to change."""

    @abstractmethod
    def set(self) -> None:
        """Change it. Raises `Stale` if it is not as it was when the slot was made."""

    @abstractmethod
    def undo(self) -> UndoState:
        """Put back exactly what was there, if what is there is still ours."""

    @abstractmethod
    def current_is_ours(self) -> bool: ...

    @abstractmethod
    def describe(self) -> str: ...

    def is_effective(self) -> bool:
        """Whether calls still come to us, perhaps through somebody's wrapper around ours."""
        return self.current_is_ours()

    def check_free(self, installed: Iterable[Slot]) -> None:  # noqa: B027
        """Raises `PatchConflict` if this cannot stand beside the slots of other patches."""


class AttrSlot(Slot):
    """`owner.attr = new` on a module, class or other object; undone by assignment or deletion."""

    def __init__(self, owner: Any, attr: str, new: Any) -> None:
        self.owner, self.attr, self.new = owner, attr, new
        self.before = own_attribute(owner, attr)

    @property
    def created(self) -> bool:
        return self.before is MISSING

    def _write(self, value: Any) -> None:
        if isinstance(self.owner, ModuleType):
            # The dict, not setattr: a property of ours or a module's own __setattr__ may sit there.
            if value is MISSING:
                del vars(self.owner)[self.attr]
            else:
                vars(self.owner)[self.attr] = value
        elif value is MISSING:
            delattr(self.owner, self.attr)
        else:
            setattr(self.owner, self.attr, value)

    def set(self) -> None:
        if own_attribute(self.owner, self.attr) is not self.before:
            raise Stale(self.describe())
        self._write(self.new)

    def undo(self) -> UndoState:
        if self.current_is_ours():
            self._write(self.before)
            return "restored"
        if self.before is not MISSING and self._splice():
            return "restored"
        self.retire()
        return "displaced"

    def retire(self) -> None:
        """Make our wrapper pass everything on; it stays where somebody else holds it."""
        switch = getattr(unbind(self.new)[0], "__torchcompat_switch__", None)
        if isinstance(switch, Switch):
            switch.on = False

    def _splice(self) -> bool:
        """Take our wrapper out from under wrapt's. Only those forward to their `__wrapped__`; on a
        plain closure it is a label."""
        wrapt = sys.modules.get("wrapt")
        current = own_attribute(self.owner, self.attr)
        while wrapt is not None and issubclass(type(current), wrapt.BaseObjectProxy):
            inner = current.__wrapped__
            if inner is self.new:
                current.__wrapped__ = self.before
                return True
            current = inner
        return False

    def current_is_ours(self) -> bool:
        return own_attribute(self.owner, self.attr) is self.new

    def is_effective(self) -> bool:
        ours = unbind(self.new)[0]
        return self.current_is_ours() or any(
            link is self.new or link is ours
            for link in _chain(own_attribute(self.owner, self.attr))
        )

    def stands_on(self, other: Slot) -> bool:
        """Whether this slot's original is what `other` installed at the same place."""
        return (
            isinstance(other, AttrSlot)
            and (other.owner is self.owner and other.attr == self.attr)
            and self.before is other.new
        )

    def describe(self) -> str:
        owner = self.owner
        if isinstance(owner, type):
            return f"{owner.__module__}:{owner.__qualname__}.{self.attr}"
        return f"{getattr(owner, '__name__', type(owner).__name__)}:{self.attr}"


class CodeSlot(Slot):
    """`function.__code__ = new_code`: the function keeps its identity for all who hold it."""

    def __init__(self, function: FunctionType, new_code: CodeType) -> None:
        self.function, self.new = function, new_code
        self.before = function.__code__

    def set(self) -> None:
        if self.function.__code__ is not self.before:
            raise Stale(self.describe())
        self.function.__code__ = self.new

    def undo(self) -> UndoState:
        if not self.current_is_ours():
            return "displaced"
        self.function.__code__ = self.before
        return "restored"

    def current_is_ours(self) -> bool:
        return self.function.__code__ is self.new

    def check_free(self, installed: Iterable[Slot]) -> None:
        # New code is made from the source, so a second patch would silently lose the first's.
        for slot in installed:
            if isinstance(slot, CodeSlot) and slot.function is self.function:
                raise PatchConflict(f"another patch has rewritten {self.function.__qualname__}")

    def describe(self) -> str:
        return f"{self.function.__module__}:{self.function.__qualname__}.__code__"


class ModulePropertySlot(Slot):
    """`module.name` goes through a property; the module's own functions still see its dict.

    Properties live on classes, so the module gets a class of its own, shared by all such slots of
    the module and taken away with the last of them.
    """

    def __init__(self, module: ModuleType, name: str, prop: property) -> None:
        self.module, self.name, self.new = module, name, prop

    def set(self) -> None:
        cls = type(self.module)
        if "__torchcompat_properties__" not in vars(cls):
            namespace = {"__torchcompat_properties__": set(), "__module__": cls.__module__}
            cls = type(cls.__name__, (cls,), namespace)
        elif self.name in vars(cls):
            raise PatchConflict(f"another patch has made {self.describe()} a property")
        setattr(cls, self.name, self.new)
        vars(cls)["__torchcompat_properties__"].add(self.name)
        self.module.__class__ = cls

    def undo(self) -> UndoState:
        cls = type(self.module)
        for holder in cls.__mro__:
            if vars(holder).get(self.name) is self.new:
                delattr(holder, self.name)
                names = vars(holder)["__torchcompat_properties__"]
                names.discard(self.name)
                if not names and holder is cls:
                    self.module.__class__ = cls.__mro__[1]
                return "restored"
        return "displaced"

    def current_is_ours(self) -> bool:
        return any(vars(c).get(self.name) is self.new for c in type(self.module).__mro__)

    def describe(self) -> str:
        return f"{self.module.__name__}:{self.name} (property)"


def set_all(slots: Sequence[Slot], installed: Sequence[Slot]) -> None:
    """Set every slot or none. Raises what the failing slot raised."""
    with ExitStack() as on_failure:  # undoes in reverse, and goes on if one cannot be undone
        for slot in slots:
            slot.check_free(installed)
            slot.set()
            on_failure.callback(slot.undo)
        on_failure.pop_all()


def take_out(slot: Slot, others: Sequence[Slot]) -> str | None:
    """Undo `slot`; says where, if somebody else's object stays over ours.

    `others` are the slots of other patches that stay: one that was put over ours gets our original
    in its turn, so that the last to go restores it.
    """
    above = next((o for o in others if isinstance(o, AttrSlot) and o.stands_on(slot)), None)
    if above is None or not isinstance(slot, AttrSlot):
        return slot.describe() if slot.undo() == "displaced" else None
    above.before = slot.before
    slot.retire()
    return slot.describe() if isinstance(slot.new, type) else None  # theirs derives from ours


def stale_aliases(slots: Iterable[Slot]) -> list[tuple[Slot, str]]:
    """Names in other modules of torch (`from x import f`) that still mean a slot's original, each
    as a sentence."""
    wanted: dict[int, AttrSlot] = {
        id(s.before): s
        for s in slots
        if isinstance(s, AttrSlot)
        and isinstance(s.owner, ModuleType)
        and isinstance(s.before, (type, FunctionType))
    }
    found: list[tuple[Slot, str]] = []
    for name, module in list(sys.modules.items()) if wanted else ():
        if name.partition(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        values = list(vars(module).values())
        if wanted.keys().isdisjoint(map(id, values)):  # nearly all: thousands of modules
            continue
        for attr, value in list(vars(module).items()):
            slot = wanted.get(id(value))
            if slot is not None and module is not slot.owner:
                line = f"{name}.{attr} still is the original of {slot.describe()}"
                found.append((slot, line))
    return found


def _chain(value: Any) -> Iterator[Any]:
    """`value` and what it wraps, outermost first."""
    for _ in range(64):
        if value is MISSING:
            return
        yield value
        value = getattr(value, "__wrapped__", MISSING)
