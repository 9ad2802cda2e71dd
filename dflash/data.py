"""Conversations: read from JSONL, checked line by line, split into training and held-out ones.

A line is one of

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
    {"prompt": "…"}    or    {"prompt": "…", "response": "…"}

A conversation that ends with the user waits for a response; the target writes it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError, DataError
from dflash.schedule import stable_seed

__all__ = ["Conversation", "Rejects", "Split", "parse_line", "read_jsonl", "split"]

_ROLES = ("system", "user", "assistant", "tool")
# Other names that the second form of a line uses.
_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and where they came from."""

    messages: tuple[Mapping[str, Any], ...]
    origin: str
    """`file:line` or a problem's name, for messages to the user."""

    @property
    def answered(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages[-1]["role"] == "assistant")

    @property
    def prompt(self) -> tuple[Mapping[str, Any], ...]:
        """Everything before the last answer."""
        return self.messages[:-1] if self.answered else self.messages


@dataclass(frozen=True)
class Split:
    """Training and held-out conversations, each in the order of the source."""

    train: tuple[Conversation, ...]
    held_out: tuple[Conversation, ...]


@dataclass
class Rejects:
    """What cannot be used: an error at once (on_bad="error"), or collected and left out."""

    on_bad: str
    problems: list[DataError] = field(default_factory=list)

    def add(self, problem: DataError) -> None:
        """Raises `problem` under on_bad="error"."""
        if self.on_bad == "error":
            raise problem
        self.problems.append(problem)


def read_jsonl(path: Path, rejects: Rejects, *, limit: int = 0) -> list[Conversation]:
    """The conversations of a file, empty lines left out; the first `limit` of them, 0 = all.

    A line that is no conversation goes to `rejects`. Raises DataError for a file that cannot be
    read or holds no conversation at all.
    """
    found: list[Conversation] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if limit and len(found) == limit:
                    break
                if not line.strip():
                    continue
                try:
                    found.append(parse_line(line, path, number))
                except DataError as error:
                    rejects.add(error)
    except OSError as error:
        raise DataError(f"there is no data file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text: {error.reason}", path) from error
    if not found:
        first = f" (the first of its bad lines: {rejects.problems[0]})" if rejects.problems else ""
        raise DataError(f"holds no conversation{first}", path)
    return found


def parse_line(line: str, path: str | Path, number: int) -> Conversation:
    """The conversation in one line. Raises DataError that says what is wrong with it."""

    def bad(problem: str) -> DataError:
        return DataError(
            f'not a conversation: {problem}; a line is {{"messages": [{{"role": "user", '
            f'"content": "…"}}, …]}} or {{"prompt": "…"}}',
            path,
            number,
            kind="not a conversation",
        )

    try:
        record = json.loads(line)
    except ValueError as error:
        raise bad(f"no valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise bad(f"a JSON {type(record).__name__}, not an object")
    try:
        messages = _messages(record)
    except ValueError as problem:
        raise bad(str(problem)) from None
    return Conversation(messages, f"{path}:{number}")


def _messages(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    if "messages" in record or "conversations" in record:
        entries = record.get("messages", record.get("conversations"))
        if not isinstance(entries, list) or not entries:
            raise ValueError("its messages are not a list with at least one message")
        messages = tuple(_message(entry, i) for i, entry in enumerate(entries, start=1))
    elif "prompt" in record:
        messages = ({"role": "user", "content": _text(record["prompt"], "prompt")},)
        if record.get("response") is not None:
            answer = _text(record["response"], "response")
            messages += ({"role": "assistant", "content": answer},)
    else:
        raise ValueError(f"it has neither messages nor prompt (its keys: {_few(record)})")
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise ValueError("it has no message of the user")
    if "assistant" in roles[: roles.index("user")]:
        raise ValueError("the assistant speaks before the user")
    if roles[-1] == "system":
        raise ValueError("it ends with a system message")
    if any(a == b == "assistant" for a, b in itertools.pairwise(roles)):
        raise ValueError("the assistant speaks twice in a row")
    return messages


def _message(entry: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"message {number} is {type(entry).__name__}, not an object")
    role = entry.get("role", entry.get("from"))
    role = _ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise ValueError(f"message {number} has the role {role!r}, not {', '.join(_ROLES)}")
    content = entry.get("content", entry.get("value"))
    others = {k: v for k, v in entry.items() if k not in ("role", "from", "content", "value")}
    if content is None and others.get("tool_calls"):
        content = ""
    return {"role": role, "content": _text(content, f"content of message {number}"), **others}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the {name} is {type(value).__name__}, not text")
    if not value.strip() and name == "prompt":
        raise ValueError("the prompt is empty")
    return value


def _few(record: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(key) for key in record)[:5]) or "none"


def split(conversations: Sequence[Conversation], held_out: int, seed: int) -> Split:
    """Keep `held_out` conversations, drawn by the seed, out of training.

    Raises ConfigError where nothing would be left to train on.
    """
    if held_out >= len(conversations):
        raise ConfigError(
            f"data.held_out is {held_out} of {len(conversations)} conversations: none would be "
            "left to train on; hold out fewer or give more"
        )
    order = list(range(len(conversations)))
    random.Random(stable_seed(seed, "held-out")).shuffle(order)
    kept = set(order[:held_out])
    return Split(
        train=tuple(c for i, c in enumerate(conversations) if i not in kept),
        held_out=tuple(c for i, c in enumerate(conversations) if i in kept),
    )
