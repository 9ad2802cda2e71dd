"""user_object_registry: objects that a compiled graph names by number are in one table for all.

From torch 2.10 a compiled function puts streams, events, module instances and the like into
`torch._dynamo.graph_bytecode_inputs` right before its graph runs, and the graph takes them out by
index. The table is one for the process: a call in another thread overwrites it, and *any* compile
clears it. The graph then raises "Index not registered in index_to_user_object_weakref", or silently
uses the other thread's stream or event. `keep_alive`, which holds what graphs create, is cleared by
any compile too.

Every thread that stores a table gets its own, and its own `keep_alive`. A thread that has never
stored one, such as autograd's for a device, reads the table stored last, as on stock torch. The
functions keep their identity and get code of their own source over that.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from torchcompat.errors import SourceDrift
from torchcompat.install import CodeSlot, ModulePropertySlot, Slot
from torchcompat.patch import Edit, Patch
from torchcompat.rewrite import PLACEHOLDER, embed, functions_using, recompile, uses_global
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_REGISTRY: Final = "torch._dynamo.graph_bytecode_inputs"
_RUNTIME: Final = "torch._functorch._aot_autograd.runtime_wrappers"  # imports the table from 2.14
_TABLE: Final = "index_to_external_object_weakref"
_KEPT: Final = "keep_alive"
# The functions that begin a new table, and whether threads without one may see it.
_BEGIN: Final = {"store_user_object_weakrefs": True, "reset_user_object_tracking": False}


class _PerThread(threading.local):
    table: Any = None
    kept: list[Any] | None = None


class _Tables:
    """What the new code has in place of the two globals; attributes go by the globals' names."""

    def __init__(self, table: Any) -> None:
        self._mine = _PerThread()
        self._last = table

    def begin(self, visible: bool) -> None:
        """Give the current thread an empty table; `visible` to threads that have none."""
        self._mine.table = type(self._last)()
        if visible:
            self._last = self._mine.table
        else:  # a compile begins, in this thread
            self._mine.kept = []

    @property
    def index_to_external_object_weakref(self) -> Any:
        mine = self._mine.table
        return self._last if mine is None else mine

    @index_to_external_object_weakref.setter
    def index_to_external_object_weakref(self, table: Any) -> None:
        self._mine.table = self._last = table

    @property
    def keep_alive(self) -> list[Any]:
        if self._mine.kept is None:
            self._mine.kept = []
        return self._mine.kept

    @keep_alive.setter
    def keep_alive(self, kept: list[Any]) -> None:
        self._mine.kept = kept


class _ToTables(ast.NodeTransformer):
    """The two globals become attributes; a function that begins a table says so first."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in (_TABLE, _KEPT):
            return node
        holder = ast.copy_location(ast.Constant(PLACEHOLDER), node)
        return ast.copy_location(ast.Attribute(holder, node.id, node.ctx), node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        names = [n for n in node.names if n not in (_TABLE, _KEPT)]
        return ast.copy_location(ast.Global(names) if names else ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name in _BEGIN:
            begin = ast.parse(f"{PLACEHOLDER!r}.begin({_BEGIN[node.name]})").body[0]
            for part in ast.walk(begin):
                if hasattr(part, "lineno"):
                    ast.copy_location(part, node.body[0])
            node.body.insert(0, begin)
        return node


def _rewritten(function: FunctionType, tables: _Tables | None) -> CodeType:
    code = recompile(function, _ToTables().visit)
    if uses_global(code, _TABLE) or uses_global(code, _KEPT):
        raise SourceDrift(f"{function.__qualname__} still uses the shared table when rewritten")
    return embed(code, {PLACEHOLDER: tables})


def _functions() -> Iterator[FunctionType]:
    registry, runtime = sys.modules[_REGISTRY], sys.modules[_RUNTIME]
    seen: set[FunctionType] = set()
    for module, name in ((registry, _TABLE), (registry, _KEPT), (runtime, _TABLE)):
        if name in vars(module):
            for function in functions_using(module, name):
                if function not in seen:
                    seen.add(function)
                    yield function


@dataclass(frozen=True)
class _TablesPerThread(Edit):
    @property
    def modules(self) -> tuple[str, ...]:
        return (_REGISTRY, _RUNTIME)

    def inspect(self) -> Finding:
        registry = sys.modules[_REGISTRY]
        for name in (_TABLE, _KEPT, *_BEGIN):
            if name not in vars(registry):
                return Finding("missing", f"{_REGISTRY}:{name} does not exist in this torch")
        if type(vars(registry)[_TABLE]) not in (dict, list):
            return Finding("drifted", f"{_REGISTRY}:{_TABLE} is neither a dict nor a list")
        names = []
        for function in _functions():
            _rewritten(function, None)
            names.append(function.__qualname__)
        lacking = [name for name in _BEGIN if name not in names]
        if lacking:
            return Finding("drifted", f"{lacking[0]} does not use the table")
        return Finding("ok", "one table for all threads", (f"used by {', '.join(names)}",))

    def build(self) -> list[Slot]:
        registry = sys.modules[_REGISTRY]
        tables = _Tables(vars(registry)[_TABLE])
        slots: list[Slot] = [CodeSlot(f, _rewritten(f, tables)) for f in _functions()]
        slots += [ModulePropertySlot(registry, n, _through(tables, n)) for n in (_TABLE, _KEPT)]
        return slots


def _through(tables: _Tables, name: str) -> property:
    def read(_: ModuleType) -> Any:
        return getattr(tables, name)

    def write(_: ModuleType, value: Any) -> None:
        setattr(tables, name, value)

    return property(read, write)


PATCH = Patch(
    id="user_object_registry",
    title="Streams, events and objects of a compiled call must be those of its own thread",
    why=(
        "What a compiled call hands to its graph by number is in one table for the process. "
        "Another thread's call overwrites it and any compile clears it: 'Index not registered in "
        "index_to_user_object_weakref', 'User object is no longer alive', or silently the stream "
        "or event of another thread."
    ),
    affects=">=2.10.0.dev0",
    edits=(_TablesPerThread(),),
    repro="repro/user_object_registry.py",
    links=("https://github.com/pytorch/pytorch/issues/168042",),
    signs=(
        Sign(text="Index not registered in index_to_user_object_weakref"),
        Sign(text="AssertionError: User object is no longer alive"),
    ),
)
