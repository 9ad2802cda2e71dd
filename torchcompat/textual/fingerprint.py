"""What the places that patches change look like in one torch: source, its digest, signature."""

from __future__ import annotations

import hashlib
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torchcompat import source
from torchcompat.errors import SourceDrift, TargetNotFound
from torchcompat.patch import Edit, Patch
from torchcompat.plugins import Catalog
from torchcompat.rewrite import functions_using
from torchcompat.target import Target, unbind
from torchcompat.textual.bindings import Assigned, Import
from torchcompat.textual.pseudo import NeedsRunning, PseudoModule, World, names_of, nothing_runs


class Fingerprints:
    """Of every place that a patch's edits name or look at, in one world.

    A place is "module:qualified.name" of a function or class, or of a module's variable. With a
    variable come the functions of its module that use it, which is what an edit of it rewrites.
    """

    def __init__(self, world: World, catalog: Catalog) -> None:
        self._world, self._catalog = world, catalog
        self._known: dict[str, dict[str, Any] | None] = {}

    def to_dict(self) -> dict[str, Any]:
        """Patch id -> place -> digest, signature (None for what takes no arguments) and text."""
        return {
            patch_id: self._of_patch(registered.patch)
            for patch_id, registered in self._catalog.patches.items()
        }

    def _of_patch(self, patch: Patch) -> dict[str, Any]:
        found = {}
        for edit in patch.edits:
            for place in self._places(edit):
                if place not in self._known:
                    self._known[place] = self._of_place(place)
                if self._known[place] is not None:
                    found[place] = self._known[place]
        return found

    def _places(self, edit: Any) -> Iterator[str]:
        parts = getattr(edit, "edits", None) or getattr(edit, "variables", None)
        if parts:
            for part in parts:
                yield from self._places(part)
        elif isinstance(getattr(edit, "target", None), str):
            yield edit.target
        elif hasattr(edit, "module") and hasattr(edit, "name"):
            yield from self._with_users(f"{edit.module}:{edit.name}")
        else:
            for place in self._looked_at(edit):
                yield from self._with_users(place)

    def _looked_at(self, edit: Edit) -> Iterable[str]:
        """What an edit of a kind of its own looks at, since it does not say what it changes."""
        self._world.looked_at.clear()
        try:
            with nothing_runs():
                edit.inspect()
        except (NeedsRunning, SourceDrift, TargetNotFound, KeyError, AttributeError):
            pass  # what was looked at until then is what there is
        return list(self._world.looked_at)

    def _with_users(self, place: str) -> Iterator[str]:
        yield place
        target = Target.parse(place)
        module: Any = sys.modules.get(target.module)
        if isinstance(module, PseudoModule) and not self._is_callable(target):
            try:
                users = functions_using(module, target.path[0])
            except SourceDrift:
                return
            yield from (f"{target.module}:{function.__qualname__}" for function in users)

    def _is_callable(self, target: Target) -> bool:
        try:
            return isinstance(unbind(target.resolve()[2])[0], (FunctionType, type))
        except (TargetNotFound, SourceDrift):
            return False

    def _of_place(self, place: str) -> dict[str, Any] | None:
        target = Target.parse(place)
        try:
            value = unbind(target.resolve()[2])[0]
        except (TargetNotFound, SourceDrift):
            return None
        if isinstance(value, (FunctionType, type)):
            text = source.text(value)
            takes = source.parameters(value) if isinstance(value, FunctionType) else None
        else:
            text, takes = _text_of_variable(target), None
        if text is None:
            return None
        return {
            "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
            "signature": None if takes is None else list(takes),
            "text": text.splitlines(),
        }


def _text_of_variable(target: Target) -> str | None:
    """The statements that bind a module's name."""
    module = sys.modules.get(target.module)
    if not isinstance(module, PseudoModule) or len(target.path) != 1:
        return None
    parts = []
    for binding in names_of(module).bindings.names.get(target.path[0], ()):
        if isinstance(binding, Import):
            parts.append(str(binding))
        elif isinstance(binding, Assigned):
            first, last = binding.statement.lineno, binding.statement.end_lineno
            lines = linecache.getlines(module.__file__ or "")[first - 1 : last]
            parts.append(textwrap.dedent("".join(lines)).rstrip())
    return "\n".join(parts) + "\n" if parts else None
