"""Functions, classes and values of one module, made from its text."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torchcompat.target import MISSING
from torchcompat.textual.bindings import (
    Assigned,
    Binding,
    FunctionNode,
    Import,
    bindings_of,
)

if TYPE_CHECKING:
    from torchcompat.textual.pseudo import Names, World

#: What a decorator or call of this name makes, from functions and without calling them.
_MADE_BY: Final[dict[str, Any]] = {
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "cached_property": functools.cached_property,
    "contextmanager": contextlib.contextmanager,
    "asynccontextmanager": contextlib.asynccontextmanager,
    "cache": functools.cache,
    "lru_cache": functools.cache,
}
#: Decorators that give the function back.
_SAME: Final = frozenset({"overload", "override", "final", "abstractmethod", "no_type_check"})
#: Calls without arguments that are made: the values have types that patches ask for.
_CALLED: Final = {
    "threading": frozenset({"RLock", "Lock", "local", "Condition", "Event"}),
    "collections": frozenset({"OrderedDict", "defaultdict", "Counter", "deque"}),
    "weakref": frozenset({"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}),
    "builtins": frozenset({"dict", "list", "set", "object"}),
}


class PseudoObject:
    """Base of all classes made here: the bases of a class on `object` alone cannot be set."""


class Reference:
    """A place in a module that may not have been looked at yet."""

    def __init__(self, module: str, path: tuple[str, ...] = ()) -> None:
        self.module, self.path = module, path

    def __repr__(self) -> str:
        return ":".join([self.module, ".".join(self.path)]).rstrip(":")


class Maker:
    """Makes what the bindings of one module say, each when it is asked for."""

    def __init__(self, module: str, package: str, code: CodeType, names: Names) -> None:
        self._module, self._package, self._names = module, package, names
        self._world: World = names.world
        self._bindings = names.bindings
        self._begun: set[str] = set()
        self._codes = {(c.co_name, c.co_firstlineno): c for c in _inner_codes(code)}

    def fill(self) -> None:
        """Put everything that the module binds into its names."""
        for name in self._bindings.names:
            self._define(name)

    def _define(self, name: str) -> Any:
        """The value of a name of the module; `MISSING` within its own definition."""
        if name not in self._begun and name in self._bindings.names:
            self._begun.add(name)
            value = self._value(self._bindings.names[name], {}, "")
            dict.__setitem__(self._names, name, value)
        return dict.get(self._names, name, MISSING)

    def _value(self, found: list[Binding], scope: dict[str, Any], outer: str) -> Any:
        binding = found[-1]
        if isinstance(binding, Import):
            path = () if binding.name is None else (binding.name,)
            return Reference(binding.module, path)
        if isinstance(binding, ast.ClassDef):
            return self._class(binding, scope, outer)
        if isinstance(binding, Assigned):
            what = f"{self._module}:{outer}{ast.unparse(binding.statement).partition('=')[0]}"
            if binding.value is None:
                return self._world.opaque(what.strip())
            return self._evaluate(binding.value, scope, what.strip())
        return self._function(binding, scope, outer)

    # -- functions

    def _function(self, node: FunctionNode, scope: dict[str, Any], outer: str) -> Any:
        code = self._codes.get((node.name, _first_line(node)))
        if code is None:
            return self._world.opaque(f"{self._module}:{outer}{node.name}")
        value: Any = self._plain_function(code, node.args, f"{outer}{node.name}")
        for decorator in reversed(node.decorator_list):
            value = self._decorated(value, decorator, scope)
        return value

    def _plain_function(self, code: CodeType, args: ast.arguments, name: str) -> FunctionType:
        closure = tuple(CellType() for _ in code.co_freevars)
        function = FunctionType(code, self._names, code.co_name, None, closure)
        function.__qualname__, function.__module__ = name, self._module
        function.__defaults__ = tuple(self._default(d, name) for d in args.defaults) or None
        function.__kwdefaults__ = {
            arg.arg: self._default(default, name)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            if default is not None
        } or None
        return function

    def _default(self, node: ast.expr, name: str) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return self._world.opaque(f"{self._module}:{name}, a default")

    def _decorated(self, value: Any, decorator: ast.expr, scope: dict[str, Any]) -> Any:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        text = ast.unparse(called)
        owner, _, name = text.rpartition(".")
        if name in ("getter", "setter", "deleter") and isinstance(scope.get(owner), property):
            return getattr(scope[owner], name)(value)
        if name in _SAME:
            return value
        if name in _MADE_BY:
            return _MADE_BY[name](value)
        return _decorated_by_others(value)

    # -- classes

    def _class(self, node: ast.ClassDef, scope: dict[str, Any], outer: str) -> type:
        bindings = bindings_of(node.body, self._package)
        qualname = f"{outer}{node.name}"
        space: dict[str, Any] = {}
        for name, found in bindings.names.items():
            for i, binding in enumerate(found):
                if i + 1 == len(found) or _is_property(binding, found):
                    space[name] = self._value(found[: i + 1], space, f"{qualname}.")
        space.pop("__slots__", None)  # would keep the class from having what they name
        space.update(__module__=self._module, __qualname__=qualname)
        space["__doc__"] = ast.get_docstring(node, clean=False)
        space["__firstlineno__"] = _first_line(node)  # where inspect looks from 3.13 on
        cls = type(node.name, (PseudoObject,), space)
        cls.__annotations__ = {n: ast.unparse(a) for n, a in bindings.annotations.items()}
        if any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            cls.__dataclass_fields__ = dict(cls.__annotations__)  # type: ignore[attr-defined]
        bases = [self._evaluate(base, scope, qualname) for base in node.bases]
        self._world.bases[cls] = bases
        return cls

    # -- values

    def _evaluate(self, node: ast.expr, scope: dict[str, Any], what: str) -> Any:
        """The value of an expression as far as the text gives it."""
        if isinstance(node, ast.Name):
            return self._named(node.id, scope, what)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._evaluate(node.value, scope, what), node.attr, what)
        if isinstance(node, ast.Lambda):
            code = self._codes.get(("<lambda>", node.lineno))
            if code is not None:
                return self._plain_function(code, node.args, "<lambda>")
        if isinstance(node, ast.Subscript):  # Generic[T] and the like
            return self._evaluate(node.value, scope, what)
        if isinstance(node, ast.Call):
            made = self._called(node, scope, what)
            return self._world.opaque(what) if made is MISSING else made
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return self._empty(node, what)

    def _empty(self, node: ast.expr, what: str) -> Any:
        """A container whose type the text tells, though not what is in it."""
        kinds: dict[type[ast.expr], Any] = {ast.Dict: dict, ast.List: list, ast.Set: set}
        kinds |= {ast.DictComp: dict, ast.ListComp: list, ast.SetComp: set}
        kind = kinds.get(type(node))
        return self._world.opaque(what) if kind is None else kind()

    def _named(self, name: str, scope: dict[str, Any], what: str) -> Any:
        if name in scope:
            return scope[name]
        found = self._define(name)
        if found is MISSING and isinstance(getattr(builtins, name, None), type):
            return Reference("builtins", (name,))
        return self._world.opaque(what) if found is MISSING else found

    def _attribute(self, owner: Any, name: str, what: str) -> Any:
        if isinstance(owner, Reference):
            return Reference(owner.module, (*owner.path, name))
        if isinstance(owner, type):
            found = inspect.getattr_static(owner, name, MISSING)
            if found is not MISSING:
                return found
        return self._world.opaque(what)

    def _called(self, node: ast.Call, scope: dict[str, Any], what: str) -> Any:
        called = self._evaluate(node.func, scope, what)
        if not isinstance(called, Reference) or len(called.path) != 1 or node.keywords:
            return MISSING
        name = called.path[0]
        if not node.args and name in _CALLED.get(called.module, ()):
            module = self._world.standard_module(called.module)
            return MISSING if module is None else getattr(module, name)()
        if name in _MADE_BY and called.module in ("builtins", "functools", "contextlib"):
            parts = [self._evaluate(arg, scope, what) for arg in node.args]
            if parts and all(isinstance(p, FunctionType) for p in parts):
                return _MADE_BY[name](*parts)
        return MISSING


def complete_bases(cls: type, world: World) -> None:
    """Give a class the bases that its text names, as far as they are classes of the tree."""
    waiting = world.bases.pop(cls, None)
    if waiting is None:
        return
    found: list[type] = []
    for base in waiting:
        value = world.follow(base) if isinstance(base, Reference) else base
        if isinstance(value, type) and issubclass(value, PseudoObject) and value is not cls:
            complete_bases(value, world)
            found += [value] if value not in found else []
    if found:
        # Assigned, not given to `type()`: that would call their `__init_subclass__`.
        with contextlib.suppress(TypeError):  # an order that cannot be: the text does not run
            cls.__bases__ = tuple(found)


def _inner_codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _inner_codes(const)


def _first_line(node: FunctionNode | ast.ClassDef) -> int:
    return node.decorator_list[0].lineno if node.decorator_list else node.lineno


def _is_property(binding: Binding, found: list[Binding]) -> bool:
    """Whether later functions of this name add to what this one makes."""
    return isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
        ast.unparse(d).endswith((".setter", ".getter", ".deleter"))
        for other in found
        if isinstance(other, (ast.FunctionDef, ast.AsyncFunctionDef))
        for d in other.decorator_list
    )


def _decorated_by_others(value: Any) -> Any:
    """What a decorator makes that nobody here knows: most use `functools.wraps`."""
    if not isinstance(value, FunctionType):
        return value

    def decorated(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError("a function of a torch that is only text")

    return functools.update_wrapper(decorated, value)
