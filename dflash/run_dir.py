"""The directory of a run: every file in it, and how it is written.

    config.json        the resolved settings (accepted back by --config and --resume)
    environment.json   command line, versions, torchcompat's status
    responses.jsonl    what the target wrote, one response a line
    metrics.jsonl      one line per logged step
    evaluation.json    the figures of the final table
    checkpoints/step-000500/   a drafter in z-lab's layout, and the state to go on from

Whole files appear by a rename, so what is there is complete; the two .jsonl files grow line by line
and a line that a crash cut short is dropped when they are read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError, ConfigError

_CHECKPOINT = re.compile(r"step-(\d{6,})$")


class RunDir:
    """Paths and atomic writes under one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.environment = path / "environment.json"
        self.responses = path / "responses.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluation = path / "evaluation.json"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path | None, *, name: str) -> RunDir:
        """A new run at `path`, or at runs/<time>-<name>. ConfigError if a run is there."""
        if path is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            base = Path("runs") / f"{stamp}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
            path, count = base, 1
            while path.exists():
                count += 1
                path = base.with_name(f"{base.name}-{count}")
        elif (path / "config.json").exists():
            raise ConfigError(f"{path} already holds a run: --resume {path}, or name another")
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the run directory {path}: {error.strerror}") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. ConfigError if there is none."""
        if not (path / "config.json").exists():
            raise ConfigError(f"{path} holds no run to resume: it has no config.json")
        (path / "checkpoints").mkdir(exist_ok=True)
        return cls(path)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def latest(self) -> tuple[int, Path] | None:
        """(step, directory) of the newest complete checkpoint."""
        found = [
            (int(match.group(1)), entry)
            for entry in self.checkpoints.glob("step-*")
            if (match := _CHECKPOINT.match(entry.name))
        ]
        return max(found, default=None)

    def keep_newest(self, count: int) -> None:
        """Remove older checkpoints, and what an interrupted write left behind."""
        steps = sorted(
            (int(match.group(1)), entry)
            for entry in self.checkpoints.iterdir()
            if (match := _CHECKPOINT.match(entry.name))
        )
        for _, entry in steps[:-count]:
            shutil.rmtree(entry)
        for entry in self.checkpoints.glob(".writing-*"):
            shutil.rmtree(entry)


def write_json(path: Path, content: Any) -> None:
    """Write a whole file at once: it is complete or it is not there."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Like write_json, for text."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """CheckpointError that names the file if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line and flush it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a cut last line is left out, another bad one is an error."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is cut
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise CheckpointError(f"{path}:{number} is not valid JSON: {error}") from error
    return records


def rewrite_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace a .jsonl file at once."""
    write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
