"""Ask the worker about one torch, and compare two of its answers."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from torchcompat.errors import ConfigError

TIMEOUT_S: Final = 300
# Without the current directory on the path: it may well be the torch that is looked at.
_START: Final = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
from torchcompat.textual.worker import main
sys.exit(main())
"""
#: Lines of a difference that are shown of one place.
MAX_LINES: Final = 40

Moved = Literal["same", "text changed", "signature changed", "gone", "new"]
#: Patch id -> place -> digest, signature, text.
Prints = dict[str, dict[str, dict[str, Any]]]


def look_into(target: str, *, verdicts: bool = True, fingerprints: bool = False) -> dict[str, Any]:
    """What the worker finds at `target`. Raises `ConfigError` where it cannot be looked into."""
    job = {"target": target, "verdicts": verdicts, "fingerprints": fingerprints}
    environ = dict(os.environ)
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():  # a checkout, perhaps known by the current directory
        inherited = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join([str(root), *inherited])
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START],
            input=json.dumps(job),
            env=environ,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{target}: no end of reading after {TIMEOUT_S} s") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"{target}: the process that reads it ended with status {done.returncode}: {last}"
        ) from None
    if "error" in found:
        raise ConfigError(str(found["error"]))
    return found


@dataclass(frozen=True)
class Change:
    """How one place of torch differs between two builds, and the patches that look at it."""

    place: str
    moved: Moved
    patches: tuple[str, ...]
    difference: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "moved": self.moved,
            "patches": list(self.patches),
            "difference": list(self.difference),
        }

    def __str__(self) -> str:
        shown = list(self.difference[:MAX_LINES])
        if len(self.difference) > MAX_LINES:
            shown.append(f"… {len(self.difference) - MAX_LINES} more lines; --json has all")
        head = f"{self.place}: {self.moved} ({', '.join(self.patches)})"
        return "\n".join([head, *(f"    {line}" for line in shown)])


def changes(before: Prints, after: Prints) -> list[Change]:
    """How each place of each patch moved."""
    old, new = _by_place(before), _by_place(after)
    found = []
    for place in dict.fromkeys([*old, *new]):
        (patches, was), (later, now) = old.get(place, ((), None)), new.get(place, ((), None))
        users = tuple(dict.fromkeys([*patches, *later]))
        moved = _moved(was, now)
        lines: tuple[str, ...] = ()
        if was and now and moved != "same":
            lines = tuple(difflib.unified_diff(was["text"], now["text"], lineterm="", n=2))[2:]
        found.append(Change(place, moved, users, lines))
    return found


def _by_place(prints: Prints) -> dict[str, tuple[tuple[str, ...], dict[str, Any] | None]]:
    found: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {}
    for patch_id, places in prints.items():
        for place, fingerprint in places.items():
            users, _ = found.get(place, ((), None))
            found[place] = ((*users, patch_id), fingerprint)
    return found


def _moved(was: dict[str, Any] | None, now: dict[str, Any] | None) -> Moved:
    if was is None or now is None:
        return "new" if was is None else "gone"
    if was["signature"] != now["signature"]:
        return "signature changed"
    return "same" if was["digest"] == now["digest"] else "text changed"
