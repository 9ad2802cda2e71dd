"""Rows of data, whatever holds them: JSON lines, Parquet, Hugging Face datasets.

A source is a comma-separated list; each part is a file, a pattern of files, a directory of files, a
directory that `datasets` saved, or a data set of the hub. Rows are counted from 1 in each part.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dflash.config import DataSettings
from dflash.errors import ConfigError, DataError

__all__ = ["Row", "iter_rows", "parts_of"]

# A JSON line that is longer holds more text than any target reads: mostly a file without line ends.
_LONGEST_LINE = 16 * 2**20

_FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".gz", ".csv")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What `datasets` leaves in a directory that it saved: one data set, or several splits.
_SAVED_ONE, _SAVED_SPLITS = "state.json", "dataset_dict.json"


class Row(NamedTuple):
    """One row: its object, or what is wrong with it."""

    path: str
    number: int
    content: dict[str, Any] | DataError


def parts_of(source: str) -> list[str]:
    """The parts of a source, patterns and directories of files spelled out, in order.

    Raises ConfigError for a part that is named twice, DataError for one that is nothing.
    """
    parts: list[str] = []
    for name in filter(None, (text.strip() for text in source.split(","))):
        parts += _spelled_out(name)
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise ConfigError(f"data.source names {twice} twice: its rows would count double")
    if not parts:
        raise ConfigError("data.source is empty: name a file, a directory or a data set")
    return parts


def iter_rows(part: str, settings: DataSettings) -> Iterator[Row]:
    """The rows of one part of `parts_of`. Raises DataError where it cannot be read at all."""
    path = Path(part)
    if path.is_dir() or not path.exists():
        yield from _dataset_rows(part, settings)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        yield from _line_rows(path)


def _spelled_out(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        if (path / _SAVED_ONE).exists() or (path / _SAVED_SPLITS).exists():
            return [name]
        files = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".parquet"))
        if not files:
            raise DataError(f"the directory {name} holds no .jsonl, no .parquet, no saved data set")
        return [str(file) for file in files]
    if path.exists():
        return [name]
    if any(sign in name for sign in "*?["):
        files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        if not files:
            raise DataError(f"no data file matches {name}")
        return [str(file) for file in files]
    if not _HUB_ID.fullmatch(name) or name.startswith(".") or name.endswith(_FILE_ENDINGS):
        raise DataError(f"there is no data file {name}")
    return [name]


def _line_rows(path: Path) -> Iterator[Row]:
    place = str(path)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                whole = len(line) <= _LONGEST_LINE
                if not whole:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_LONGEST_LINE)
                    text = f"the line is longer than {_LONGEST_LINE >> 20} MiB: one row a line"
                    yield Row(place, number, DataError(text, path, number, kind="line too long"))
                elif line.strip():
                    yield Row(place, number, _object(line, path, number))
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror}") from error


def _object(line: bytes, path: Path, number: int) -> dict[str, Any] | DataError:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        words = f"not UTF-8 text: byte {error.start + 1} of the line: {error.reason}"
        return DataError(words, path, number, kind="not UTF-8")
    hint = ""
    if number == 1 and text.lstrip().startswith("["):
        hint = "; a file that is one JSON array becomes lines by: jq -c '.[]'"
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return DataError(f"no valid JSON ({error}){hint}", path, number, kind="no valid JSON")
    if not isinstance(record, dict):
        words = f"a JSON {type(record).__name__}, not an object{hint}"
        return DataError(words, path, number, kind="not an object")
    return record


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = _optional("pyarrow.parquet", f"the Parquet file {path}", "pyarrow")
    arrow = importlib.import_module("pyarrow")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield Row(str(path), number, record)
    except (OSError, arrow.ArrowException) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(f"no Parquet file that can be read: {first_line}", path) from error


def _dataset_rows(part: str, settings: DataSettings) -> Iterator[Row]:
    datasets = _optional("datasets", f"the data set {part}", "datasets")
    try:
        if Path(part).is_dir():
            found = datasets.load_from_disk(part)
        else:
            found = datasets.load_dataset(part, settings.subset or None)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(
            f"there is no data file {part}, and no data set of the hub that can be read here: "
            f"{first_line}"
        ) from error
    if isinstance(found, dict):
        if settings.split not in found:
            raise ConfigError(
                f"data.split is {settings.split!r}; {part} has {', '.join(sorted(found))}"
            )
        found = found[settings.split]
    for number, record in enumerate(found, start=1):
        yield Row(part, number, dict(record))


def _optional(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{what} needs {package} ({error}): pip install 'torchcompat-dflash[data]', or give "
            "JSON lines"
        ) from error
