"""What the statements of a module or class bind, found without running any of them.

Where the text has alternatives (`if`, `try`) and does not itself decide between them, the first one
that binds a name counts: the body before `else`, `try` before `except`.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_KNOWN: Final = {
    "TYPE_CHECKING": False,
    "typing.TYPE_CHECKING": False,
    "sys.version_info": sys.version_info[:],
    "sys.platform": sys.platform,
    "os.name": os.name,
    "__name__": "",
}
_COMPARE: Final[dict[type[ast.cmpop], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Import:
    """`import module` (`name` is None) or `from module import name`."""

    module: str
    name: str | None
    bound: str

    def __str__(self) -> str:
        if self.name is None:
            return f"import {self.module} as {self.bound}"
        return f"from {self.module} import {self.name} as {self.bound}"


@dataclass(frozen=True)
class Assigned:
    """`name = value`; without a value where the text gives none to this name alone."""

    value: ast.expr | None
    statement: ast.stmt


Binding = FunctionNode | ast.ClassDef | Import | Assigned


@dataclass
class Bindings:
    """The names of one module or class."""

    names: dict[str, list[Binding]] = field(default_factory=dict)
    """Every binding of a name, the one that holds last; a property's functions are several."""
    stars: list[str] = field(default_factory=list)
    annotations: dict[str, ast.expr] = field(default_factory=dict)

    def _take(self, first: Bindings, *others: Bindings) -> None:
        """Take over what one of several alternatives binds."""
        for other in reversed((first, *others)):
            for name, found in other.names.items():
                self.names[name] = [*self.names.get(name, []), *found]
            self.annotations.update(other.annotations)
        self.stars += [s for other in (first, *others) for s in other.stars]


def bindings_of(body: Iterable[ast.stmt], package: str) -> Bindings:
    """The bindings of statements in a module of `package`, which relative imports start from."""
    found = Bindings()
    for statement in body:
        _bind(statement, package, found)
    return found


def _bind(node: ast.stmt, package: str, into: Bindings) -> None:
    def put(name: str, binding: Binding) -> None:
        into.names.setdefault(name, []).append(binding)

    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        put(node.name, node)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for one in imports(node, package):
            if one.name == "*":
                into.stars.append(one.module)
            else:
                put(one.bound, one)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            for name, value in _pairs(target, node.value):
                put(name, Assigned(value, node))
    elif isinstance(node, ast.AnnAssign):
        if isinstance(node.target, ast.Name):
            into.annotations[node.target.id] = node.annotation
            if node.value is not None:
                put(node.target.id, Assigned(node.value, node))
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            if isinstance(target, ast.Name):
                into.names.pop(target.id, None)
    else:
        _bind_compound(node, package, into)


def _bind_compound(node: ast.stmt, package: str, into: Bindings) -> None:
    def of(body: list[ast.stmt]) -> Bindings:
        return bindings_of(body, package)

    if isinstance(node, ast.If):
        decided = decide(node.test)
        if decided is None:
            into._take(of(node.body), of(node.orelse))
        else:
            into._take(of(node.body if decided else node.orelse))
    elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
        handlers = [of(handler.body) for handler in node.handlers]  # type: ignore[attr-defined]
        into._take(of([*node.body, *node.orelse]), *handlers)  # type: ignore[attr-defined]
        into._take(of(node.finalbody))  # type: ignore[attr-defined]
    elif isinstance(node, (ast.With, ast.AsyncWith, ast.For, ast.AsyncFor, ast.While)):
        targets: list[ast.expr | None] = []
        if isinstance(node, (ast.With, ast.AsyncWith)):
            targets += [item.optional_vars for item in node.items]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            targets.append(node.target)
        for target in targets:
            for name, _ in _pairs(target, None) if target is not None else ():
                into.names.setdefault(name, []).append(Assigned(None, node))
        into._take(of([*node.body, *getattr(node, "orelse", [])]))
    elif isinstance(node, ast.Match):
        bodies = [of(case.body) for case in node.cases]
        into._take(*bodies)


def imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[Import]:
    """What an import statement binds; `name` is "*" for all names of a module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield Import(alias.name, None, alias.asname)
            else:
                top = alias.name.partition(".")[0]
                yield Import(top, None, top)
        return
    module = node.module or ""
    if node.level:
        parents = package.split(".")
        start = ".".join(parents[: len(parents) - node.level + 1])
        module = f"{start}.{module}".strip(".")
    for alias in node.names:
        yield Import(module, alias.name, alias.asname or alias.name)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that an assignment's target binds, each with its own value if the text has one."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _pairs(target.value, None)
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts: list[ast.expr | None] = [None] * len(target.elts)
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        if same and not any(isinstance(e, ast.Starred) for e in [*target.elts, *value.elts]):  # type: ignore[union-attr]
            parts = list(value.elts)  # type: ignore[union-attr]
        for inner, part in zip(target.elts, parts, strict=True):
            yield from _pairs(inner, part)


def decide(test: ast.expr) -> bool | None:
    """What a condition comes to, if the text and this Python decide it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = decide(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [decide(value) for value in test.values]
        ends = isinstance(test.op, ast.Or)
        if ends in parts:
            return ends
        return None if None in parts else not ends
    try:
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            compare = _COMPARE.get(type(test.ops[0]))
            if compare is not None:
                return bool(compare(_fact(test.left), _fact(test.comparators[0])))
            return None
        return bool(_fact(test))
    except (ValueError, TypeError, KeyError):
        return None


def _fact(node: ast.expr) -> Any:
    """Raises `ValueError` or `KeyError` for what the text does not tell."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _KNOWN[ast.unparse(node)]
    return ast.literal_eval(node)
