"""Names of things in torch: "torch.fx._symbolic_trace:Tracer.trace" and where they live."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from torchcompat.errors import TargetNotFound, nearest

MISSING: Final[Any] = type("Missing", (), {"__repr__": lambda self: "MISSING"})()


@dataclass(frozen=True)
class Target:
    """`module:qualified.name`."""

    module: str
    path: tuple[str, ...]

    @staticmethod
    @functools.cache  # as many as there are edits
    def parse(text: str) -> Target:
        """Raises `ValueError` for anything but `package.module:Name.attribute`."""
        module, colon, path = text.partition(":")
        names = [*module.split("."), *path.split(".")]
        if not colon or not all(name.isidentifier() for name in names):
            raise ValueError(f"target {text!r} is not of the form 'package.module:Name.attribute'")
        return Target(module, tuple(path.split(".")))

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"

    def owner(self) -> Any:
        """The object whose attribute the last name is. Raises `TargetNotFound`."""
        owner: Any = sys.modules.get(self.module)
        if owner is None:
            raise TargetNotFound(f"{self.module} is not imported")
        for name in self.path[:-1]:
            found = static_attribute(owner, name)
            if found is MISSING:
                hint = nearest(name, vars(owner))
                raise TargetNotFound(f"{self} does not exist in this torch: no {name!r}; {hint}")
            owner = found
        return owner

    def resolve(self) -> tuple[Any, str, Any]:
        """(owner, attribute, raw value), the value as it stands in the class or module: static
        and class methods and properties unbound. Raises `TargetNotFound`."""
        owner, name = self.owner(), self.path[-1]
        value = static_attribute(owner, name)
        if value is MISSING:
            hint = nearest(name, vars(owner))
            raise TargetNotFound(f"{self} does not exist in this torch; {hint}")
        return owner, name, value


def own_attribute(owner: Any, name: str) -> Any:
    """What `owner` itself has under `name`, `MISSING` if nothing or only by inheritance."""
    return vars(owner).get(name, MISSING)


def static_attribute(owner: Any, name: str) -> Any:
    """What `owner` or a base class has under `name`, without running any descriptor."""
    if isinstance(owner, ModuleType):
        return own_attribute(owner, name)  # never a module's __getattr__: it may import
    return inspect.getattr_static(owner, name, MISSING)


def unbind(raw: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The callable inside a class attribute, and how to dress another one alike."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__, type(raw)
    if isinstance(raw, property):
        getter = raw
        return raw.fget, lambda f: property(f, getter.fset, getter.fdel, getter.__doc__)
    return raw, lambda f: f
