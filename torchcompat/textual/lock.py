"""`python -m torchcompat lock`: record what the places that patches change look like, and compare.

The file has the text of each place once, so that a review of a newly written one shows what torch
has changed. With the setting `lock` a patch stands back where a place of its has changed since.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torchcompat import config
from torchcompat.build import TorchBuild, find_build
from torchcompat.errors import ConfigError
from torchcompat.textual.looking import Change, Prints, changes, look_into
from torchcompat.textual.tree import digest

DEFAULT: Final = "torchcompat.lock"
_FORMAT: Final = 1
_KEYS: Final = {"digest", "signature", "text"}


def installed() -> str:
    """The folder with the torch that an import would find. Raises `ConfigError` without one."""
    build = find_build()
    if build is None or build.path is None:
        raise ConfigError("torch is not installed; name a wheel or a folder with --torch")
    return str(Path(build.path).parent)


def write(path: Path, found: Mapping[str, Any]) -> int:
    """Record the worker's answer; the number of places."""
    places = {p: f for prints in found["fingerprints"].values() for p, f in prints.items()}
    content = {
        "format": _FORMAT,
        "torch": found["torch"],
        "files": dict(sorted(found["files"].items())),
        "patches": {i: sorted(prints) for i, prints in sorted(found["fingerprints"].items())},
        "places": dict(sorted(places.items())),
    }
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)  # whoever reads meanwhile has the old file or the new one
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e.strerror}") from None
    return len(places)


def read(path: Path) -> dict[str, Any]:
    """What a lock file has recorded. Raises `ConfigError` where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"lock file {path}: {e.strerror}; write one with `python -m torchcompat lock {path}`"
        ) from None
    except ValueError as e:
        raise ConfigError(f"lock file {path} is no JSON: {e}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(f"lock file {path} is not of format {_FORMAT}; write it anew")
    parts = [content.get(name) for name in ("torch", "files", "patches", "places")]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError(f"lock file {path} is incomplete; write it anew")
    for place, fingerprint in content["places"].items():
        if not isinstance(fingerprint, dict) or not fingerprint.keys() >= _KEYS:
            raise ConfigError(f"lock file {path}: {place} has no fingerprint; write it anew")
    for patch_id, places in content["patches"].items():
        if not isinstance(places, list) or not all(p in content["places"] for p in places):
            raise ConfigError(f"lock file {path}: {patch_id} has an unknown place; write it anew")
    return content


def _prints(content: Mapping[str, Any]) -> Prints:
    return {i: {p: content["places"][p] for p in ps} for i, ps in content["patches"].items()}


def since(content: Mapping[str, Any], found: Mapping[str, Any]) -> list[Change]:
    """What has moved since the file was written, of the patches that it knows."""
    now = {i: prints for i, prints in found["fingerprints"].items() if i in content["patches"]}
    before = {i: prints for i, prints in _prints(content).items() if i in now}
    return [change for change in changes(before, now) if change.moved != "same"]


# -- for `apply()`


def standing_back(path: str, build: TorchBuild | None) -> Mapping[str, str]:
    """The patches that may not be applied, and why: by patch id. Raises `ConfigError`."""
    file = Path(path)
    if build is None or build.path is None:
        return {}
    try:
        stamp = file.stat().st_mtime_ns
    except OSError:
        stamp = 0  # `read` says what is the matter
    return _standing_back(file, stamp, Path(build.path).parent)


@functools.lru_cache(maxsize=8)
def _standing_back(file: Path, _: int, folder: Path) -> Mapping[str, str]:
    content = read(file)
    if all(_digest_of(folder / name) == known for name, known in content["files"].items()):
        return {}  # the same files, so the same places
    try:
        moved = since(content, look_into(str(folder), verdicts=False, fingerprints=True))
    except ConfigError as e:
        reason = f"torch differs from that of {file}, and cannot be compared: {e}"
        return dict.fromkeys(content["patches"], reason)
    reasons: dict[str, str] = {}
    for change in moved:
        for patch_id in change.patches:
            reasons.setdefault(
                patch_id,
                f"{change.place} is not as {file} recorded it ({change.moved}); see "
                f"`python -m torchcompat lock --check {file}`",
            )
    return reasons


def _digest_of(path: Path) -> str | None:
    try:
        return digest(path.read_bytes())
    except OSError:
        return None


# -- the command


def command(args: argparse.Namespace) -> int:
    """Exit status 0: written, or nothing has changed; 1: something has."""
    path = Path(args.file or config.load().lock or DEFAULT)
    target = args.torch or installed()
    content = read(path) if args.check else None
    found = look_into(target, verdicts=False, fingerprints=True)
    build = TorchBuild.of(found["torch"]["version"], found["torch"]["git"])
    if content is None:
        count = write(path, found)
        if args.json:
            print(json.dumps({"file": str(path), "torch": build.to_dict(), "places": count}))
        else:
            print(f"{path}: {count} places of {build}")
        return 0
    moved = since(content, found)
    if args.json:
        changed = [change.to_dict() for change in moved]
        now = build.to_dict()
        result = {"file": str(path), "recorded": content["torch"], "torch": now, "changed": changed}
        print(json.dumps(result, indent=2))
    else:
        print(f"{path}: torch {content['torch'].get('version')}; now {build}")
        print(*moved, f"{len(moved)} places changed of {len(content['places'])} recorded", sep="\n")
    return int(bool(moved))


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "lock", help="record the places that patches change, or compare with it", parents=[common]
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"default: the setting, {DEFAULT}")
    parser.add_argument("--check", action="store_true", help="what has changed since; 1 if any")
    parser.add_argument("--torch", metavar="TARGET", help="a wheel, checkout or folder instead")
    parser.set_defaults(run=command)
