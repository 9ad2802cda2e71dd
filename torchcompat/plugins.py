"""Where patches come from: entry points of the group "torchcompat.patches", our own included.

An entry point's object is a `Patch`, an iterable of them, a callable that returns either, or a
module with `PATCHES`. Loading runs foreign code, so the engine does it without its lock, and what
goes wrong in one entry point stays there.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from torchcompat.config import Settings
from torchcompat.errors import ConfigError, PluginError, nearest
from torchcompat.patch import Patch
from torchcompat.verdict import State, Verdict

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

GROUP: Final = "torchcompat.patches"
BUILTIN: Final = "builtin"
_PACKAGE: Final = "torchcompat.patches"


@dataclass(frozen=True, eq=False)
class Registered:
    """A patch and who brought it. `package` is where its reproducer's path starts."""

    patch: Patch
    provenance: str
    package: str


@dataclass(frozen=True, eq=False)
class Catalog:
    """All patches by id, in the order in which they may be applied, and the broken entry points.

    `absent` are the plugins that exist but gave nothing: broken, or not to be loaded.
    """

    patches: dict[str, Registered]
    broken: tuple[Verdict, ...]
    absent: frozenset[str]

    def check_ids(self, ids: Iterable[str], layer: str) -> None:
        """Raises `ConfigError` for an id that nobody knows."""
        for patch_id in ids:
            if patch_id in self.patches or patch_id.partition(":")[0] in self.absent:
                continue
            raise ConfigError(
                f"{layer}: unknown patch {patch_id!r}, {nearest(patch_id, self.patches)}"
            )


def load(settings: Settings) -> Catalog:
    """Load the plugins that the settings allow. Raises `ConfigError` for an unknown plugin name."""
    from importlib.metadata import EntryPoint  # here for the sake of a quick start

    points = {_key(p): p for p in installed(GROUP)}
    if not any(p.name == BUILTIN for p in points.values()) and _checkout() is not None:
        own = EntryPoint(BUILTIN, f"{_PACKAGE}:PATCHES", GROUP)
        points = {_key(own): own, **points}
    names = {p.name for p in points.values()}
    if isinstance(settings.plugins, tuple):
        for name in settings.plugins:
            if name not in names:
                where = settings.where("plugins")
                raise ConfigError(f"{where}: unknown plugin {name!r}, {nearest(name, names)}")
    found: dict[str, Registered] = {}
    broken: list[Verdict] = []
    absent: set[str] = set()
    for point in sorted(points.values(), key=lambda p: (p.name != BUILTIN, p.name, p.value)):
        allowed = settings.plugins if isinstance(settings.plugins, tuple) else ()
        if point.name != BUILTIN and settings.plugins != "auto" and point.name not in allowed:
            absent.add(point.name)
            continue
        try:
            for registered in _load_one(point):
                if registered.patch.id in found:
                    raise PluginError(f"patch {registered.patch.id!r} exists already")
                found[registered.patch.id] = registered
        except (Exception, SystemExit) as e:  # noqa: BLE001 - foreign code may raise anything
            absent.add(point.name)
            reason = f"entry point {point.value!r} does not load: {type(e).__name__}: {e}"
            broken.append(Verdict(point.name, State.FAILED, reason, (), _provenance(point)))
    return Catalog(_in_order(found), tuple(broken), frozenset(absent - {BUILTIN}))


def installed(group: str) -> list[EntryPoint]:
    """What `importlib.metadata.entry_points(group=group)` gives, for a quarter of the time: only
    the files that name the group are parsed."""
    from importlib.metadata import PackageNotFoundError, distribution, distributions

    found: list[EntryPoint] = []
    for dist in distributions():
        text = dist.read_text("entry_points.txt") or ""
        if f"[{group}]" not in text:
            continue
        try:  # another of its name that comes first on sys.path is the one that is installed
            shadowed = (
                distribution(_name_and_version(dist)[0]).read_text("entry_points.txt") != text
            )
        except (PackageNotFoundError, ValueError):
            shadowed = False
        if not shadowed:
            found += [p for p in dist.entry_points if p.group == group]
    return found


def _load_one(point: EntryPoint) -> list[Registered]:
    if point.name == BUILTIN:
        if point.value != f"{_PACKAGE}:PATCHES":
            raise PluginError(f"the name {BUILTIN!r} is torchcompat's own")
        load_checkout()
    brought_by = _provenance(point)
    patches = [Registered(p, brought_by, point.module) for p in _patches_of(point.load())]
    prefix = "" if point.name == BUILTIN else f"{point.name}:"
    for registered in patches:
        patch_id = registered.patch.id
        if not patch_id.startswith(prefix) or (not prefix and ":" in patch_id):
            raise PluginError(f"patch id {patch_id!r} must start with {prefix!r}")
    return patches


def _patches_of(value: Any) -> list[Patch]:
    if isinstance(value, ModuleType):
        value = value.PATCHES
    if callable(value):
        value = value()
    patches = [value] if isinstance(value, Patch) else list(value)
    for patch in patches:
        if not isinstance(patch, Patch):
            raise PluginError(f"{patch!r} is no torchcompat.Patch")
    return patches


def _checkout() -> Path | None:
    """`patches/` beside this package's folder in a source checkout, never in site-packages."""
    root = Path(__file__).parent.parent
    folder = root / "patches"
    is_checkout = (root / "pyproject.toml").is_file() and (folder / "__init__.py").is_file()
    return folder if is_checkout else None


class _CheckoutFinder:
    """Finds `../patches` under the name that it has when installed."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = _checkout()
        if name != _PACKAGE or folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def load_checkout() -> None:
    """Make `torchcompat.patches` importable in a checkout that is not installed."""
    if _checkout() is not None and _CheckoutFinder not in sys.meta_path:
        sys.meta_path.append(_CheckoutFinder)  # last: an installed one comes first


def _in_order(found: dict[str, Registered]) -> dict[str, Registered]:
    """What a patch requires comes before it; otherwise as found. A cycle is broken anywhere: its
    members will be judged blocked."""
    ordered: dict[str, Registered] = {}
    visiting: set[str] = set()

    def visit(patch_id: str) -> None:
        if patch_id in ordered or patch_id in visiting or patch_id not in found:
            return
        visiting.add(patch_id)
        for other in found[patch_id].patch.requires:
            visit(other)
        ordered[patch_id] = found[patch_id]

    for patch_id in found:
        visit(patch_id)
    return ordered


def _key(point: EntryPoint) -> tuple[str, str]:
    return point.name, point.value


def _provenance(point: EntryPoint) -> str:
    return "source checkout" if point.dist is None else " ".join(_name_and_version(point.dist))


def _name_and_version(dist: Distribution) -> tuple[str, str]:
    """By its two lines: `dist.name` parses all of the metadata each time, the description too."""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    header = text.partition("\n\n")[0]
    found = dict(re.findall(r"^(Name|Version):\s*(\S+)\s*$", header, re.MULTILINE))
    return found.get("Name", "unnamed"), found.get("Version", "unknown")
