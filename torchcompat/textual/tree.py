"""The Python files of a torch in a wheel, a source checkout or an unpacked folder.

An archive is read in memory, member by member and only members that are asked for: nothing is
extracted, so no name in it can lead anywhere. What could still harm (members without end, links,
names said twice) is refused with a `ConfigError` that names the archive and the member.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from torchcompat.build import TorchBuild, assigned
from torchcompat.errors import ConfigError, SourceDrift

#: The largest source file of torch has 1.2 MiB; of all that is read in one check, some 20 MiB.
MAX_FILE: Final = 8 * 2**20
MAX_TOTAL: Final = 256 * 2**20
MAX_MEMBERS: Final = 400_000
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 0x1


class Tree(ABC):
    """Python modules by name. `label` is what the user called it."""

    label: str

    def __init__(self, label: str) -> None:
        self.label = label
        #: What a file's path is shown under.
        self.shown_root = label
        #: Of the source files read so far.
        self.digests: dict[str, str] = {}
        self._left = MAX_TOTAL
        self._files: dict[str, dict[str, str]] = {}

    @abstractmethod
    def _list(self, package: str) -> Iterable[str]:
        """The .py files of a top-level package, as paths relative to the folder that holds it."""

    @abstractmethod
    def _read(self, path: str) -> bytes | None:
        """The bytes of a file, at most `MAX_FILE`; None without it. Raises `ConfigError`."""

    def modules(self, package: str) -> dict[str, str]:
        """The modules of a top-level package, and the file of each."""
        if package not in self._files:
            self._files[package] = dict(_by_name(sorted(self._list(package))))
        return self._files[package]

    def file_of(self, module: str) -> str | None:
        return self.modules(module.partition(".")[0]).get(module)

    def bytes_of(self, path: str) -> bytes | None:
        """A file's content, or None. Raises `ConfigError` for one past the bounds."""
        content = self._read(path)
        if content is not None:
            if len(content) > MAX_FILE:
                raise ConfigError(f"{self.label}: {path} is larger than {MAX_FILE} bytes")
            self._left -= len(content)
            if self._left < 0:
                raise ConfigError(f"{self.label}: more than {MAX_TOTAL} bytes to read")
        return content

    def text(self, path: str) -> str:
        """A source file as Python would decode it; "" without it. Raises `SourceDrift` where it
        cannot be decoded, `ConfigError` for one past the bounds."""
        content = self.bytes_of(path)
        self.digests[path] = digest(content or b"")
        try:
            return "" if content is None else importlib.util.decode_source(content)
        except (SyntaxError, UnicodeDecodeError, LookupError) as e:
            raise SourceDrift(f"{path} cannot be decoded: {e}") from None

    def build(self) -> TorchBuild:
        """Which torch this is, by its version file, its metadata or the checkout's version.txt."""
        text = _lenient(self.bytes_of("torch/version.py"))
        version = assigned(text, "__version__") or self._metadata_version()
        if version is None:
            version = _lenient(self.bytes_of("version.txt")).strip()
        return TorchBuild.of(version or "unknown", assigned(text, "git_version"), None)

    @abstractmethod
    def _metadata(self) -> bytes | None: ...

    def _metadata_version(self) -> str | None:
        for line in _lenient(self._metadata()).splitlines():
            name, colon, value = line.partition(":")
            if not colon:
                break  # the headers end at the first blank line
            if name.lower() == "version":
                return value.strip()
        return None


def digest(content: bytes) -> str:
    """First 32 hex digits of the SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()[:32]


def open_tree(target: str) -> Tree:
    """The tree at a path. Raises `ConfigError` where there is none, or none that may be read."""
    path = Path(target)
    if path.is_dir():
        return Folder(target, path)
    if path.is_file():
        return Archive(target, path)
    raise ConfigError(f"{target}: no such file or folder; give a wheel, a checkout or a folder")


class Folder(Tree):
    """A checkout, a site-packages, a virtual environment, or a torch package itself."""

    def __init__(self, label: str, path: Path) -> None:
        super().__init__(label)
        candidates = [path, *sorted(path.glob("lib/python3*/site-packages"))]
        if path.resolve().name == "torch":  # the package itself
            candidates.insert(0, path.resolve().parent)
        root = next((c for c in candidates if (c / "torch" / "__init__.py").is_file()), None)
        if root is None:
            raise ConfigError(f"{label}: no torch/__init__.py in this folder")
        self.root = root
        self.shown_root = str(root)

    def _list(self, package: str) -> Iterator[str]:
        top = self.root / package
        if not top.is_dir():
            return
        cut = len(str(top)) - len(package)
        for folder, _, names in os.walk(top):
            start = folder[cut:].replace(os.sep, "/")
            yield from (f"{start}/{name}" for name in names if name.endswith(".py"))

    def _read(self, path: str) -> bytes | None:
        file = self.root / path
        try:
            if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for ever
                return None
            with file.open("rb") as stream:
                return stream.read(MAX_FILE + 1)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise ConfigError(f"{self.label}: {path} cannot be read: {e.strerror}") from None

    def _metadata(self) -> bytes | None:
        found = sorted(self.root.glob("torch-*.dist-info/METADATA"))
        return self._read(found[0].relative_to(self.root).as_posix()) if found else None


class Archive(Tree):
    """A wheel, or a zip of a checkout (with one folder around it)."""

    def __init__(self, label: str, path: Path) -> None:
        super().__init__(label)
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, OSError, ValueError) as e:
            raise ConfigError(f"{label}: no readable wheel or zip: {e}") from None
        members = self._zip.infolist()
        if len(members) > MAX_MEMBERS:
            raise ConfigError(f"{label}: more than {MAX_MEMBERS} members")
        starts = [m.filename for m in members if _is_init_of_torch(m.filename)]
        if not starts:
            raise ConfigError(f"{label}: no torch/__init__.py in this archive")
        prefix = min(starts, key=len)[: -len("torch/__init__.py")]
        if prefix and not _is_plain(prefix[:-1]):
            self._refuse(f"{prefix}torch/__init__.py", "is no plain relative name")
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            if member.filename.startswith(prefix):
                name = member.filename[len(prefix) :]
                if _is_of_interest(name, member):
                    self._add(name, member)

    def _add(self, name: str, member: zipfile.ZipInfo) -> None:
        if name in self._members:
            self._refuse(name, "is in it twice")
        if member.orig_filename != member.filename or not _is_plain(name):
            self._refuse(member.orig_filename, "is no plain relative name")
        if _is_link(member):
            self._refuse(name, "is a link")
        if member.flag_bits & _ENCRYPTED:
            self._refuse(name, "is encrypted")
        if member.compress_type not in _METHODS:
            self._refuse(name, f"is packed in a way (method {member.compress_type}) wheels are not")
        if member.file_size > MAX_FILE:
            self._refuse(name, f"is larger than {MAX_FILE} bytes")
        self._members[name] = member

    def _refuse(self, name: str, why: str) -> None:
        raise ConfigError(f"{self.label}: member {name!r} {why}; this is no archive to trust")

    def _list(self, package: str) -> Iterator[str]:
        start = f"{package}/"
        return (n for n in self._members if n.startswith(start) and n.endswith(".py"))

    def _read(self, path: str) -> bytes | None:
        member = self._members.get(path)
        if member is None:
            return None
        try:
            with self._zip.open(member) as stream:
                return stream.read(MAX_FILE + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as e:
            raise ConfigError(f"{self.label}: member {path!r} cannot be read: {e}") from None

    def _metadata(self) -> bytes | None:
        names = sorted(n for n in self._members if n.endswith("/METADATA"))
        return self._read(names[0]) if names else None


def _is_init_of_torch(name: str) -> bool:
    return name == "torch/__init__.py" or name.endswith("/torch/__init__.py")


def _is_of_interest(name: str, member: zipfile.ZipInfo) -> bool:
    """Whether a member may be read, or could lead to others than those it seems to lead to."""
    if _is_link(member):
        return name.partition("/")[0] == "torch" or name.endswith(".py")
    path = PurePosixPath(name)
    metadata = path.name == "METADATA" and path.parent.name.startswith("torch-")
    return name.endswith(".py") or name == "version.txt" or metadata


def _is_link(member: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(member.external_attr >> 16)


def _is_plain(name: str) -> bool:
    return "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _by_name(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(module, file). A package comes before a module of the same name, as for Python."""
    found: dict[str, str] = {}
    for path in paths:
        parts = path[: -len(".py")].split("/")
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        if all(part.isidentifier() for part in parts):
            name = ".".join(parts)
            if is_package or name not in found:
                found[name] = path
    return iter(found.items())


def _lenient(content: bytes | None) -> str:
    return "" if content is None else content.decode("utf-8", "replace")
