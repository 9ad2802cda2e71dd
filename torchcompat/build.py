"""Which torch is here, found without importing it, and how version bounds apply to it."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from packaging.version import Version

Channel = Literal["release", "rc", "nightly", "vendor", "source"]
Place = Literal["inside", "below", "above"]

# What PyTorch's own release wheels carry after the "+".
_RELEASE_LOCAL: Final = re.compile(r"(cpu|cu\d+|rocm[\d.]+|xpu)(\.cxx11\.abi)?")
_SOURCE_LOCAL: Final = re.compile(r"(git[0-9a-f]*|[0-9a-f]{7,40})")
_BOUND: Final = re.compile(r"\s*(>=|<)\s*([^\s<>=!~,]+)\s*")


@dataclass(frozen=True)
class TorchBuild:
    """One torch. `base` is "2.15.0", `dev_date` a nightly's number, `path` the package's folder."""

    version: str
    channel: Channel
    base: str
    dev_date: int | None
    local: str | None
    git: str | None
    path: str | None

    @classmethod
    def of(cls, version: str, git: str | None = None, path: str | None = None) -> TorchBuild:
        """Read a version text. One that is no PEP 440 version counts as built from source."""
        parsed = _parse(version)
        if parsed is None:
            return cls(version, "source", version, None, None, git, path)
        return cls(
            version, _channel(parsed), parsed.base_version, parsed.dev, parsed.local, git, path
        )

    @property
    def version_is_final(self) -> bool:
        """Whether the version says exactly which code this is. Elsewhere fixes come and go between
        two builds of the same number, and vendors' alphas sort after every nightly."""
        return self.channel in ("release", "rc")

    def place(self, affects: str) -> Place:
        """Where this build lies against the bounds; inside if the version cannot be read."""
        parsed = _parse(self.version)
        if parsed is None:
            return "inside"
        # Compared directly: specifier sets answer "no" to nightlies on both sides of a bound, and
        # differ between releases of packaging.
        for operator, bound in parse_bounds(affects):
            if operator == ">=" and parsed < bound:
                return "below"
            if operator == "<" and parsed >= bound:
                return "above"
        return "inside"

    def to_dict(self) -> dict[str, Any]:
        return {"version": self.version, "channel": self.channel, "git": self.git}

    def __str__(self) -> str:
        git = f", git {self.git[:10]}" if self.git else ""
        return f"torch {self.version} ({self.channel}{git})"


@functools.cache
def parse_bounds(affects: str) -> tuple[tuple[str, Version], ...]:
    """Read ">=2.6.0.dev0,<2.14.0.dev0".

    Only `>=` and `<` with a `.devN` bound are bounds that mean the same for releases, nightlies
    and vendor builds: 2.15.0.dev1 and 2.15.0a0 lie neither in `<2.15` nor in `>=2.15`.
    Raises `ValueError` for anything else.
    """
    bounds = []
    for part in affects.split(","):
        match = _BOUND.fullmatch(part)
        version = _parse(match[2]) if match else None
        if match is None or version is None:
            raise ValueError(f"bound {part!r}: write '>=X.Y.Z.dev0' or '<X.Y.Z.dev0'")
        if version.dev is None or version.local is not None:
            raise ValueError(
                f"bound {part!r} leaves nightlies and vendor builds on neither side: "
                f"write '{match[1]}{version.base_version}.dev0'"
            )
        bounds.append((match[1], version))
    return tuple(bounds)


def find_build() -> TorchBuild | None:
    """The torch that is imported, or that an import would find; None without one."""
    module = sys.modules.get("torch")
    folders = list(getattr(module, "__path__", ()))
    if not folders:
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    text = _version_file(folders)
    loaded = getattr(module, "__version__", None)
    version = str(loaded) if loaded is not None else assigned(text, "__version__")
    path = folders[0] if folders else None
    return TorchBuild.of(version or "unknown", assigned(text, "git_version"), path)


def _version_file(folders: list[str]) -> str:
    for folder in folders:
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
    return ""


def assigned(text: str, name: str) -> str | None:
    """The string that the source `text` assigns to `name` at the beginning of a line."""
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


@functools.cache
def _parse(version: str) -> Version | None:
    # Here for the sake of a quick `import torchcompat`.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version)
    except InvalidVersion:
        return None


def _channel(version: Version) -> Channel:
    local = version.local or ""
    if _SOURCE_LOCAL.fullmatch(local):
        return "source"
    if version.dev is not None:
        return "nightly"
    if version.pre is not None and version.pre[0] in ("a", "b"):
        return "vendor" if local else "source"
    if local and not _RELEASE_LOCAL.fullmatch(local):
        return "vendor"
    return "release" if version.pre is None else "rc"
