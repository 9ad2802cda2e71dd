"""Move a module's global variable into thread-local storage, in place.

Torch keeps per-thread facts ("am I tracing?") in module globals. Rebinding the functions that use
such a global would miss every alias (a compiled function holds the check in its closure, Dynamo
knows the functions by identity), so the functions stay the same objects and only their `__code__`
is replaced: the source is parsed, each read and write of the global becomes a read and write of an
attribute of a `threading.local`, and the result is compiled under the original file name and line.
The module attribute becomes a property, so that `module.NAME` means the same storage from outside.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import linecache
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from torchcompat.errors import SourceDrift
from torchcompat.install import AttrSlot, CodeSlot, ModulePropertySlot, Slot, UndoState
from torchcompat.patch import Edit
from torchcompat.verdict import Finding

_FUTURE_FLAGS: Final = sum(
    getattr(__future__, name).compiler_flag for name in __future__.all_feature_names
)
#: Alone or with a name behind it, stands in recompiled source for an object that `embed` puts in.
PLACEHOLDER: Final = "<torchcompat> "
_KINDS: Final = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
)
_GLOBAL_OPS: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"})


def uses_global(code: CodeType, name: str) -> bool:
    """Whether `code`, or a function defined in it, reads or writes the global `name`."""
    if name in code.co_names and any(
        i.opname in _GLOBAL_OPS and i.argval == name for i in dis.get_instructions(code)
    ):
        return True
    return any(uses_global(c, name) for c in code.co_consts if isinstance(c, CodeType))


def functions_using(module: ModuleType, name: str) -> list[FunctionType]:
    """The functions and methods defined in `module` that use its global `name`, by source order.

    Decorated functions are found through `__wrapped__` (`contextlib.contextmanager` and the like).
    """
    found: dict[int, FunctionType] = {}
    holders: list[object] = list(vars(module).values())
    for value in list(holders):
        if isinstance(value, type) and value.__module__ == module.__name__:
            holders.extend(vars(value).values())
    for value in holders:
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        value = value.fget if isinstance(value, property) else value
        while isinstance(value, FunctionType):
            if value.__globals__ is vars(module) and uses_global(value.__code__, name):
                found[id(value)] = value
            value = getattr(value, "__wrapped__", None)
    return sorted(found.values(), key=lambda f: f.__code__.co_firstlineno)


def _replaced(node: ast.AST, names: AbstractSet[str]) -> ast.AST:
    """`NAME` -> `<placeholder of NAME>.value`, and no `global NAME` any more."""
    if isinstance(node, ast.Name) and node.id in names:
        holder = ast.copy_location(ast.Constant(PLACEHOLDER + node.id), node)
        return ast.copy_location(ast.Attribute(holder, "value", node.ctx), node)
    if isinstance(node, ast.Global) and not names.isdisjoint(node.names):
        left = [n for n in node.names if n not in names]
        return ast.copy_location(ast.Global(left) if left else ast.Pass(), node)
    return node


def _globals_to_attributes(root: ast.AST, names: AbstractSet[str]) -> None:
    """In place, everywhere below `root`. A plain loop: an `ast.NodeTransformer` takes four times as
    long, while torch is being imported."""
    todo = [root]
    while todo:
        node = todo.pop()
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                new = _replaced(value, names)
                setattr(node, field, new)
                todo.append(new)
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        value[i] = _replaced(item, names)
                        todo.append(value[i])


def embed(code: CodeType, values: Mapping[str, object]) -> CodeType:
    """`code`, and every function defined in it, with `values` for the constants that name them.

    Constants rather than globals of the module: a call that is under way when the patch is taken
    away still finds them.
    """
    consts = (
        embed(c, values)
        if isinstance(c, CodeType)
        else values.get(c, c)
        if isinstance(c, str)
        else c
        for c in code.co_consts
    )
    return code.replace(co_consts=tuple(consts))


def _last_line(code: CodeType) -> int:
    """The last file line that any instruction of `code`, or of a function in it, belongs to."""
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, CodeType)]
    return max([line or 0 for _, _, line in code.co_lines()] + inner)


def _definition(function: FunctionType, *, first_line: int = 1) -> ast.FunctionDef:
    """The parsed `def` of `function` without its decorators, as if it began at `first_line`."""
    # Not inspect.getsource, which looks through all of sys.modules, nor a parse of the whole file:
    # this runs while torch is being imported. The text ends with the last instruction's line, or a
    # few lines later where that is in the middle of a statement.
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first, last = code.co_firstlineno, _last_line(code)
    for end in range(last, min(last + 40, len(lines)) + 1):
        source = textwrap.dedent("".join(lines[first - 1 : end]))
        try:
            tree = ast.parse("\n" * (first_line - 1) + source)
        except SyntaxError:
            continue
        node = tree.body[0] if len(tree.body) == 1 else None
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            node.decorator_list = []
            return node
        break
    raise SourceDrift(f"no readable source for {function.__qualname__}")


def _find_code(code: CodeType, name: str) -> CodeType | None:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_name == name:
                return const
            inner = _find_code(const, name)
            if inner is not None:
                return inner
    return None


def recompile(function: FunctionType, change: Callable[[ast.FunctionDef], ast.AST]) -> CodeType:
    """Code for `function` after `change` to its syntax tree, under its own file, name and lines.

    Raises `SourceDrift` where the source cannot be had or the result would not fit the function
    (other arguments, other free variables, another kind of function).
    """
    body = ast.fix_missing_locations(change(_definition(function)))
    ast.increment_lineno(body, function.__code__.co_firstlineno - 1)
    return _compiled(function, body)


def _compiled(function: FunctionType, body: Any) -> CodeType:
    """Code for `function` from its changed definition, whose nodes all have their lines."""
    old = function.__code__
    parts = function.__qualname__.split(".")
    if len(parts) > 1 and parts[-2] != "<locals>":  # private names are mangled by the class
        shell = ast.parse(f"class {parts[-2]}: pass").body[0]
        assert isinstance(shell, ast.ClassDef)
        shell.body, body = [body], shell
    outer_names = [n for n in old.co_freevars if n != "__class__"]
    if outer_names:
        scope = ast.parse("def scope():\n " + " = ".join(outer_names) + " = None").body[0]
        assert isinstance(scope, ast.FunctionDef)
        scope.body.append(body)
        body = scope
    unit = compile(
        ast.Module([body], []),
        old.co_filename,
        "exec",
        flags=old.co_flags & _FUTURE_FLAGS,
        dont_inherit=True,
    )
    new = _find_code(unit, old.co_name)
    if new is None:
        raise SourceDrift(f"{function.__qualname__} is lost when recompiled")
    for field in ("co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"):
        if getattr(new, field) != getattr(old, field):
            raise SourceDrift(f"{function.__qualname__} recompiled differs in {field}")
    if (new.co_flags ^ old.co_flags) & _KINDS:
        raise SourceDrift(f"{function.__qualname__} recompiled is another kind of function")
    changes: dict[str, Any] = {"co_firstlineno": old.co_firstlineno}
    if sys.version_info >= (3, 11):
        changes["co_qualname"] = old.co_qualname
    return new.replace(**changes)


def rewrite_globals(function: FunctionType, holders: Mapping[str, object]) -> CodeType:
    """Code for `function` in which each global `name` is `holders[name].value`."""
    return _with_holders(_without_globals(function, holders), holders)


def _without_globals(function: FunctionType, names: Iterable[str]) -> CodeType:
    """Code for `function` with placeholders for the globals `names`."""
    node = _definition(function, first_line=function.__code__.co_firstlineno)
    _globals_to_attributes(node, frozenset(names))
    new = _compiled(function, node)
    for name in names:
        if uses_global(new, name):
            raise SourceDrift(f"{function.__qualname__} still uses the global {name} rewritten")
    return new


def _with_holders(code: CodeType, holders: Mapping[str, object]) -> CodeType:
    return embed(code, {PLACEHOLDER + name: holder for name, holder in holders.items()})


def thread_value(
    default: object = None, fresh: Callable[[], object] | None = None
) -> threading.local:
    """A `threading.local` whose `.value` is `default` in every thread that has not set it.

    With `fresh` each thread begins with an object of its own, for values changed in place.
    """
    if fresh is None:
        # A class attribute serves threads that never wrote: no initialiser on the hot path.
        namespace: dict[str, object] = {"value": default}
    else:
        make = fresh

        def __init__(self: Any) -> None:
            self.value = make()

        namespace = {"__init__": __init__}
    cls: type[threading.local] = type("ThreadValue", (threading.local,), namespace)
    return cls()


class _ShadowedGlobal(AttrSlot):
    """The global behind the property. Untouched while the patch is in, for calls under way in the
    old code; undoing leaves the default, not what some thread happened to leave there."""

    def set(self) -> None:
        pass

    def current_is_ours(self) -> bool:
        return True

    def undo(self) -> UndoState:
        self._write(self.new)
        return "restored"


@dataclass(frozen=True, kw_only=True, eq=False)
class ThreadLocal(Edit):
    """Give every thread its own value of the global `module.name`, starting from `default`.

    `fresh` makes each thread's own start instead, for objects that are changed in place; the main
    thread goes on with the object that is there, since others may hold it. `fixed_by` names
    attributes of the module that only a torch with per-thread state of its own has: any of them
    present means that upstream fixed the fault. `optional`: some versions do not have the global,
    and need nothing done. `holder` makes the storage (an object with a `value`) from what is there,
    for state that is not simply each thread's own.
    """

    module: str
    name: str
    default: object = None
    fresh: Callable[[], object] | None = None
    fixed_by: tuple[str, ...] = ()
    optional: bool = False
    holder: Callable[[object], Any] | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.module,)

    def make_holder(self, current: object) -> Any:
        """Where the values are from now on."""
        if self.holder is not None:
            return self.holder(current)
        return thread_value(self.default, self.fresh)

    def inspect(self) -> Finding:
        return _inspect(self.module, (self,))

    def build(self) -> list[Slot]:
        return _build(self.module, (self,))


@dataclass(frozen=True, kw_only=True, eq=False)
class ThreadLocals(Edit):
    """Several `ThreadLocal` of one module that share functions, which are rewritten once."""

    variables: tuple[ThreadLocal, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return self.variables[0].modules

    def inspect(self) -> Finding:
        return _inspect(self.variables[0].module, self.variables)

    def build(self) -> list[Slot]:
        return _build(self.variables[0].module, self.variables)


def _present(module: ModuleType, variables: Sequence[ThreadLocal]) -> list[ThreadLocal]:
    return [v for v in variables if not v.optional or v.name in vars(module)]


def _users(module: ModuleType, names: Sequence[str]) -> dict[FunctionType, list[str]]:
    """The functions of `module` that use any of `names`, and which each uses."""
    users: dict[FunctionType, list[str]] = {}
    for name in names:
        for function in functions_using(module, name):
            users.setdefault(function, []).append(name)
    return users


class _Rewritten:
    """A function's code without the globals `names`, and the code it was made from."""

    def __init__(self, function: FunctionType, names: Sequence[str]) -> None:
        self.function, self.names, self.before = function, names, function.__code__
        self.after = _without_globals(function, names)

    def is_current(self) -> bool:
        return self.function.__code__ is self.before


# What `_inspect` made, for the `_build` that comes right after it: rewriting is most of the work,
# and is done while torch is being imported.
_inspected: Final[
    dict[tuple[str, ...], tuple[tuple[int, ...], dict[FunctionType, _Rewritten]]]
] = {}


def _content(module: ModuleType) -> tuple[int, ...]:
    """Differs for a module of the same name that is another, or has been executed again."""
    return tuple(map(id, (vars(module), *vars(module).values())))


def _key(module_name: str, variables: Sequence[ThreadLocal]) -> tuple[str, ...]:
    return (module_name, *(v.name for v in variables))


def _inspect(module_name: str, variables: Sequence[ThreadLocal]) -> Finding:
    module = sys.modules[module_name]
    for name in (name for v in variables for name in v.fixed_by):
        if hasattr(module, name):
            return Finding("fixed", f"{module_name} has {name}: the state is per thread here")
    present = _present(module, variables)
    for variable in present:
        if variable.name not in vars(module):
            return Finding("missing", f"{module_name}:{variable.name} is not in this torch")
    users = _users(module, [v.name for v in present])
    unused = {v.name for v in present} - {name for names in users.values() for name in names}
    if unused:
        return Finding("drifted", f"no function of {module_name} uses the global {min(unused)}")
    try:
        rewritten = {f: _Rewritten(f, names) for f, names in users.items()}
    except SourceDrift as e:
        return Finding("drifted", str(e))
    _inspected[_key(module_name, present)] = _content(module), rewritten
    where = ", ".join(v.name for v in present)
    used_by = ", ".join(f.__qualname__ for f in users)
    if not present:
        return Finding("ok", f"{module_name} has nothing of the kind in this torch")
    return Finding("ok", f"{module_name}:{where} is for all threads", (f"used by {used_by}",))


def _build(module_name: str, variables: Sequence[ThreadLocal]) -> list[Slot]:
    module = sys.modules[module_name]
    present = _present(module, variables)
    stores: dict[str, Any] = {v.name: v.make_holder(vars(module)[v.name]) for v in present}
    content, rewritten = _inspected.pop(_key(module_name, present), (None, {}))
    if content != _content(module) or not all(r.is_current() for r in rewritten.values()):
        rewritten = {f: _Rewritten(f, names) for f, names in _users(module, list(stores)).items()}
    slots: list[Slot] = [
        CodeSlot(function, _with_holders(r.after, {name: stores[name] for name in r.names}))
        for function, r in rewritten.items()
    ]
    for variable in present:
        before = variable.default
        if variable.holder is not None:
            before = vars(module)[variable.name]
        if variable.fresh is not None:
            before = vars(module)[variable.name]
            if threading.current_thread() is threading.main_thread():
                stores[variable.name].value = before
        slots.append(_ShadowedGlobal(module, variable.name, before))
        slots.append(ModulePropertySlot(module, variable.name, _property(stores[variable.name])))
    return slots


def _property(store: Any) -> property:
    def read(_: ModuleType) -> object:
        return store.value

    def write(_: ModuleType, value: object) -> None:
        store.value = value

    return property(read, write)
