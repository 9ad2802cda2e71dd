"""The folders in which Inductor, Triton and torch's C++ extensions keep what they compiled."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchcompat.doctor.section import Section

#: A compile may be under way; what is older than this is left over.
OLD_S: Final = 3600.0
#: Beyond so many files the rest is not looked at, and the page says so.
MOST_FILES: Final = 100_000
LOW_SPACE: Final = 1 << 30  # bytes
_VARIABLES: Final = {
    "extensions": "TORCH_EXTENSIONS_DIR",
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "triton": "TRITON_CACHE_DIR",
}
_LEFT_OVER: Final = re.compile(r".*\.tmp|tmp\.pid_.*")
# What a reader of these cannot do without: the first bytes.
_BEGINNINGS: Final = {".so": b"\x7fELF", ".cubin": b"\x7fELF", ".json": b"{"}
_NEVER_EMPTY: Final = frozenset({".py", ".cpp", ".ptx", ".ttir", ".ttgir", ".llir", ".pt2", ".cu"})


def folders(environ: Mapping[str, str]) -> dict[str, Path]:
    """Where they are, by torch's and Triton's own rules."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError, ImportError):  # a container's user without a name
        user = "unknown"
    inductor = environ.get("TORCHINDUCTOR_CACHE_DIR")
    home = Path(environ.get("TRITON_HOME") or Path.home())
    triton = environ.get("TRITON_CACHE_DIR")
    extensions = environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        "extensions": Path(extensions or cache / "torch_extensions"),
        "inductor": Path(inductor or Path(tempfile.gettempdir()) / f"torchinductor_{user}"),
        "triton": Path(triton or home / ".triton" / "cache"),
    }


@dataclass
class _Content:
    """What lies in a folder: counts, bytes, and paths of what looks wrong."""

    files: int = 0
    size: int = 0
    left_over: list[Path] = field(default_factory=list)
    locks: list[Path] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    cut: bool = False


def caches_section(environ: Mapping[str, str] | None = None) -> Section:
    """Each folder: there, writable, how large, how much room, and what is left over or damaged."""
    section = Section("caches")
    for name, folder in folders(os.environ if environ is None else environ).items():
        _look_at(section, name, folder)
    return section


def _look_at(section: Section, name: str, folder: Path) -> None:
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(nearest, os.W_OK | os.X_OK) and nearest.is_dir()
    free = shutil.disk_usage(nearest).free
    content = _content(folder)
    section.data[name] = {
        "path": str(folder),
        "exists": folder.exists(),
        "writable": writable,
        "free_bytes": free,
        "files": content.files,
        "bytes": content.size,
        "left_over": len(content.left_over),
        "old_locks": [str(path) for path in content.locks],
        "damaged": [str(path) for path in content.damaged],
    }
    state = "does not exist yet"
    if folder.exists():
        more = "more than " if content.cut else ""
        state = f"{more}{content.files} files, {_shown(content.size)}"
    section.lines.append(f"{name}: {folder}: {state}, {_shown(free)} free")
    if not writable:
        section.find(
            f"{name}'s cache {folder} is not writable",
            f"make it so, or set {_VARIABLES[name]} to a folder that is",
        )
    if free < LOW_SPACE:
        section.find(f"{_shown(free)} are free for {folder}", "make room, or move the cache")
    for paths, what, way_out in (
        (content.left_over, "left-over temporary", "they can be deleted"),
        (
            content.locks,
            "old lock",
            "delete them: a build that was killed left them, and others wait",
        ),
        (content.damaged, "truncated or empty", "delete them: they are compiled again"),
    ):
        if paths:
            section.find(f"{len(paths)} {what} files in {folder}, such as {paths[0]}", way_out)


def _content(folder: Path) -> _Content:
    content, now = _Content(), time.time()
    for path, status in _files(folder):
        if content.files >= MOST_FILES:
            content.cut = True
            break
        content.files += 1
        content.size += status.st_size
        if now - status.st_mtime < OLD_S:
            continue
        if _LEFT_OVER.fullmatch(path.name) or _LEFT_OVER.fullmatch(path.parent.name):
            content.left_over.append(path)
        elif path.name == "lock":
            # A file baton of torch's: whoever finds it waits for it to go, for ever. The *.lock
            # files are taken by flock and stay behind; they are in nobody's way.
            content.locks.append(path)
        elif _is_damaged(path, status.st_size):
            content.damaged.append(path)
    return content


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                yield path, path.stat()
            except OSError:  # gone meanwhile
                continue


def _is_damaged(path: Path, size: int) -> bool:
    beginning = _BEGINNINGS.get(path.suffix)
    if size == 0:
        return beginning is not None or path.suffix in _NEVER_EMPTY
    if beginning is None:
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(beginning)) != beginning
    except OSError:
        return False


def _shown(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
