"""Replacements that several traces want at once: set by the first, undone by the last.

FX replaces functions such as `math.sqrt` in the globals of the traced code by wrappers that look
for a proxy among their arguments. Such a wrapper serves any tracer and is transparent to everybody
else; what breaks under threads is that the trace that ends first takes it away from the others, and
the one that ends last puts a dead wrapper back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

_ABSENT: Final = object()


@dataclass
class Entry:
    """A replaced name. `namespace` is a dict (module globals) or a class."""

    namespace: dict[str, Any] | type
    name: str
    original: Any
    new: Any
    users: int = 0

    def read_own(self) -> Any:
        space = self.namespace
        return (space if isinstance(space, dict) else vars(space)).get(self.name, _ABSENT)

    def write(self, value: Any) -> None:
        if isinstance(self.namespace, dict):
            if value is _ABSENT:
                self.namespace.pop(self.name, None)
            else:
                self.namespace[self.name] = value
        elif value is _ABSENT:
            delattr(self.namespace, self.name)
        else:
            setattr(self.namespace, self.name, value)


_entries: dict[tuple[int, str], Entry] = {}
_lock = threading.Lock()


def acquire(namespace: dict[str, Any] | type, name: str, new: Any) -> Entry:
    """Use the replacement of `name`: the one in place, or `new` for the first user."""
    key = (id(namespace), name)
    with _lock:
        entry = _entries.get(key)
        if entry is None or entry.read_own() is not entry.new:
            entry = _entries[key] = Entry(namespace, name, _ABSENT, new)
            entry.original = entry.read_own()
            entry.write(new)
        entry.users += 1
    return entry


def release(entry: Entry) -> None:
    """One user less. After the last one the original value (or its absence) is back."""
    key = (id(entry.namespace), entry.name)
    with _lock:
        entry.users -= 1
        if entry.users == 0:
            if _entries.get(key) is entry:
                del _entries[key]
            if entry.read_own() is entry.new:  # somebody else's later value is not ours to undo
                entry.write(entry.original)


def original_of(namespace: dict[str, Any] | type, name: str, value: Any) -> Any:
    """What stands behind `value`, if that is a replacement that another trace has set."""
    with _lock:
        entry = _entries.get((id(namespace), name))
    return entry.original if entry is not None and entry.new is value else value


def originals_of(ids: set[int]) -> set[int]:
    """Identities of the originals behind those replacements in place whose identity is in `ids`."""
    with _lock:
        return {id(e.original) for e in _entries.values() if id(e.new) in ids}
