"""Modules made from source text, for patches to look at.

A patch looks at a loaded torch: `vars(sys.modules[name])`, `isinstance(x, FunctionType)`, code
objects, signatures, source. Here all of that is made from the text alone: `compile` gives the code
objects, and nothing ever runs them. What only a run could tell (the result of a call, anything in
C) is an `Opaque`; an attribute of one is taken to be there, which the verdict's evidence says, and
a call of one, or of any function made here, raises `NeedsRunning`.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from torchcompat.errors import SourceDrift
from torchcompat.target import MISSING
from torchcompat.textual.bindings import Bindings, bindings_of
from torchcompat.textual.make import Maker, Reference, complete_bases
from torchcompat.textual.tree import Tree

#: The modules of torch that have no text; every attribute asked for is taken to be there.
_IN_C: Final = "torch._C"
_MENTIONED_IN_C: Final = re.compile(r"\btorch\._C(?:\.\w+)*")
#: What the import system and `inspect` ask of any module, without wanting to know what is in it.
_OUTSIDE: Final = frozenset(
    {"__name__", "__spec__", "__file__", "__path__", "__package__", "__loader__", "__class__"}
)


class NeedsRunning(Exception):
    """The answer is in code that would have to be run."""


class Opaque:
    """A value that the text does not give."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        self._what, self._tell = what, tell

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        what = f"{self._what}.{name}"
        self._tell(what)
        return Opaque(what, self._tell)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NeedsRunning(self._what)

    def __repr__(self) -> str:
        return f"<{self._what}, not in the text>"


class World:
    """All modules of one tree, made as they are looked at."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.taken_on_trust: dict[str, None] = {}
        self.looked_at: dict[str, None] = {}
        self.bases: dict[type, list[Any]] = {}
        self._modules: dict[str, PseudoModule] = {}

    def opaque(self, what: str) -> Opaque:
        return Opaque(what, lambda told: self.taken_on_trust.update({told: None}))

    def module(self, name: str) -> PseudoModule | None:
        """The module of that name; None if the tree has none."""
        found = self._modules.get(name)
        if found is None:
            file = self.tree.file_of(name)
            if file is None and not is_in_c(name):
                return None
            found = self._modules[name] = PseudoModule(name, file, self)
            if file is None:
                sys.modules[name] = found
        return found

    def install(self, packages: set[str]) -> None:
        """Put all modules of these packages into `sys.modules`, and keep all others of theirs from
        being imported."""
        for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
            del sys.modules[name]
        for package in packages:
            for name in self.tree.modules(package):
                module = self.module(name)
                if module is not None:
                    sys.modules[name] = module
        self.module(_IN_C)
        sys.meta_path.insert(0, _Blocker(packages, self.tree.label))

    def standard_module(self, name: str) -> ModuleType | None:
        """A module of Python's library that is loaded; none is loaded for a torch's sake."""
        known = name.partition(".")[0] in sys.stdlib_module_names
        return sys.modules.get(name) if known else None

    def follow(self, reference: Reference) -> Any:
        """What a reference leads to; opaque where that is not in the text."""
        name, path = reference.module, list(reference.path)
        value: Any = self.module(name) or self.standard_module(name)
        while value is not None and path:
            step = path.pop(0)
            found = self._step(value, step)
            value = None if found is None else found[0]
        return self.opaque(str(reference)) if value is None else value

    def _step(self, value: Any, name: str) -> tuple[Any] | None:
        if isinstance(value, PseudoModule):
            found = names_of(value).find(name)
            if found is MISSING:
                found = self.module(f"{value.__name__}.{name}") or MISSING
        elif isinstance(value, (Opaque, ModuleType)):
            found = getattr(value, name, MISSING)
        else:
            found = inspect.getattr_static(value, name, MISSING)
        return None if found is MISSING else (found,)


class Names(dict[str, Any]):
    """A module's names. References to other modules are followed when they are asked for."""

    def __init__(self, module: str, world: World) -> None:
        super().__init__()
        self.module, self.world = module, world
        self.bindings = Bindings()

    def find(self, name: str) -> Any:
        """The value of a name, `MISSING` without one."""
        found = super().get(name, MISSING)
        if isinstance(found, Reference):
            self[name] = MISSING  # a circle of references ends here
            found = self[name] = self.world.follow(found)
        if found is MISSING:
            found = self._from_stars(name)
        if isinstance(found, type):
            complete_bases(found, self.world)
        return found

    def _from_stars(self, name: str) -> Any:
        for source in self.bindings.stars if not name.startswith("_") else ():
            module = None if is_in_c(source) else self.world.module(source)
            if module is not None and source != self.module:
                found = names_of(module).find(name)
                if found is not MISSING:
                    return found
        return MISSING

    def __getitem__(self, name: str) -> Any:
        found = self.find(name)
        if found is MISSING:
            raise KeyError(name)
        if not name.startswith("__"):
            self.world.looked_at[f"{self.module}:{name}"] = None
        return found

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name, MISSING) is not MISSING


class _NamesInC(Names):
    """The names of a module without text: every one that is asked for."""

    def find(self, name: str) -> Any:
        if name.startswith("__"):
            return MISSING
        what = f"{self.module}:{name}"
        self.world.taken_on_trust[what] = None
        return self.world.opaque(what)


class PseudoModule(ModuleType):
    """A module of the tree. Its text is read when anything but its place is asked for."""

    def __init__(self, name: str, file: str | None, world: World) -> None:
        super().__init__(name)
        is_package = file is None or file.endswith("/__init__.py")
        own = _own(self)
        own["__spec__"] = ModuleSpec(name, None, is_package=is_package)
        own["__package__"] = name if is_package else name.rpartition(".")[0]
        own["__loader__"] = self  # tells `inspect` that the lines may be in linecache alone
        own["world"], own["file"], own["names"] = world, file, None
        if file is not None:
            own["__file__"] = f"{world.tree.shown_root}/{file}"
        if is_package:
            own["__path__"] = [f"{world.tree.shown_root}/{name.replace('.', '/')}"]

    def __getattribute__(self, name: str) -> Any:
        # Never ModuleType's own: that would call a `__getattr__` that the text defines.
        own = _own(self)
        if name == "__dict__":
            return names_of(self)
        if name in _OUTSIDE:
            if name not in own and name != "__class__":
                raise AttributeError(name)
            return PseudoModule if name == "__class__" else own[name]
        found = names_of(self).get(name, MISSING)
        if found is MISSING and "__path__" in own:
            world: World = own["world"]
            found = world.module(f"{own['__name__']}.{name}") or MISSING
        if found is MISSING:
            raise AttributeError(f"module {own['__name__']!r} has no attribute {name!r}")
        return found

    def __repr__(self) -> str:
        return f"<text of {self.__name__}>"


def _own(module: PseudoModule) -> dict[str, Any]:
    own: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return own


def names_of(module: PseudoModule) -> Names:
    """Raises `SourceDrift` where the module's text is not Python to this interpreter."""
    own = _own(module)
    if isinstance(own["names"], str):
        raise SourceDrift(own["names"])
    if own["names"] is None:
        try:
            own["names"] = _read(own)
        except SourceDrift as e:
            own["names"] = str(e)
            raise
    names: Names = own["names"]
    return names


def _read(own: dict[str, Any]) -> Names:
    world: World = own["world"]
    name, file = own["__name__"], own["file"]
    if file is None:
        return _NamesInC(name, world)
    text = world.tree.text(file)
    shown = own["__file__"]
    try:
        tree = ast.parse(text, shown)
        code = compile(tree, shown, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as e:
        python = ".".join(map(str, sys.version_info[:2]))
        raise SourceDrift(f"{file} is no text that Python {python} can read: {e}") from None
    for mentioned in set(_MENTIONED_IN_C.findall(text)):
        world.module(mentioned)  # some of them no modules: nobody asks `sys.modules` for those
    linecache.cache[shown] = (len(text), None, text.splitlines(True), shown)
    names = Names(name, world)
    for key in _OUTSIDE & own.keys():
        dict.__setitem__(names, key, own[key])
    dict.__setitem__(names, "__builtins__", {})  # a function that ran after all could call nothing
    names.bindings = bindings_of(tree.body, own["__package__"])
    annotations = {n: ast.unparse(a) for n, a in names.bindings.annotations.items()}
    own["names"] = names  # whatever asks for it from here on gets what there is
    Maker(name, own["__package__"], code, names).fill()
    dict.__setitem__(names, "__annotations__", annotations)
    return names


def is_in_c(module: str) -> bool:
    return module == _IN_C or module.startswith(f"{_IN_C}.")


class _Blocker:
    """Before all other finders: what a tree does not have of its packages is nowhere."""

    def __init__(self, packages: set[str], label: str) -> None:
        self._packages, self._label = packages, label

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"no module named {name!r} in {self._label}", name=name)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """While inside, in this thread and those it starts, a function made from text that is called
    raises `NeedsRunning` before its first line."""

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and type(frame.f_globals) is Names:
            raise NeedsRunning(f"{frame.f_globals.module}:{frame.f_code.co_name}")

    sys.settrace(watch)
    threading.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
