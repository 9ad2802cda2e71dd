"""Conversations: rows made into messages and checked, split into training and held-out ones.

A row is one of

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
    {"prompt": "…"}    or    {"prompt": "…", "response": "…"}
    {"text": "…"}      with the template's marks in it, or plain

Messages may have `tool_calls`; a row may have `tools` and, beside its messages, a `system` text.
A conversation that ends with the user, or with a tool, waits for a response; the target writes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.config import DataSettings
from dflash.errors import ConfigError, DataError
from dflash.schedule import stable_seed
from dflash.sources import iter_rows, parts_of

__all__ = ["Conversation", "Form", "Rejects", "Split", "read_data", "split"]

_ROLES = ("system", "user", "assistant", "tool")
# Other names of the roles that data sets use.
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}

_FIELDS = ("messages", "role", "content", "prompt", "response", "text", "tools", "system")


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and where they came from."""

    messages: tuple[Mapping[str, Any], ...]
    origin: str
    """`file:line` or a problem's name, for messages to the user."""
    tools: tuple[Any, ...] = ()
    """Schemas of the functions that the assistant may call."""
    text: str | None = None
    """A text that is rendered already; there are no messages then."""

    @property
    def answered(self) -> bool:
        """Whether the last message is the assistant's, or the text is complete as it is."""
        return self.text is not None or bool(self.messages[-1]["role"] == "assistant")

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


@dataclass(frozen=True)
class Form:
    """How a row becomes a conversation: which of the forms, and what its fields are called."""

    format: str = "auto"
    names: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(settings: DataSettings) -> Form:
        """From data.format and data.fields. Raises ConfigError."""
        names = {}
        for pair in filter(None, (text.strip() for text in settings.fields.split(","))):
            ours, sign, theirs = (part.strip() for part in pair.partition("="))
            if ours not in _FIELDS or not sign or not theirs:
                raise ConfigError(
                    f"data.fields has {pair!r}; it is {{{'|'.join(_FIELDS)}}}=<name in the data>, "
                    "with commas between"
                )
            names[ours] = theirs
        return Form(settings.format, names)

    def conversation(self, record: Mapping[str, Any], path: str, number: int) -> Conversation:
        """The conversation of a row. Raises DataError that says what is wrong with it."""
        origin = f"{path}:{number}"
        try:
            if self._kind(record) == "text":
                words = _text(self._get(record, "text"), "text")
                return Conversation((), origin, text=words)
            tools = self._get(record, "tools")
            if isinstance(tools, str) and tools:  # tables keep what has no fixed form as JSON
                tools = json.loads(tools)
            if tools is not None and not isinstance(tools, (list, str)):
                raise ValueError(f"its tools are {type(tools).__name__}, not a list")
            return Conversation(self._messages(record), origin, tuple(tools or ()))
        except ValueError as problem:
            raise DataError(
                f'not a conversation: {problem}; a row is {{"messages": [{{"role": "user", '
                f'"content": "…"}}, …]}}, {{"prompt": "…"}} or {{"text": "…"}} (data.format, '
                "data.fields)",
                path,
                number,
                kind="not a conversation",
            ) from None

    def _name(self, ours: str) -> str:
        return self.names.get(ours, ours)

    def _get(self, record: Mapping[str, Any], ours: str) -> Any:
        return record.get(self._name(ours))

    def _kind(self, record: Mapping[str, Any]) -> str:
        if self.format != "auto":
            return self.format
        for kind in ("messages", "conversations", "prompt", "text"):
            if record.get(self._name(kind)) is not None:
                return kind
        keys = ", ".join(sorted(map(str, record))[:5]) or "none"
        raise ValueError(f"it has neither messages, prompt nor text (its keys: {keys})")

    def _messages(self, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        kind = self._kind(record)
        if kind == "prompt":
            prompt = _text(self._get(record, "prompt"), "prompt")
            messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": prompt},)
            if self._get(record, "response") is not None:
                answer = _text(self._get(record, "response"), "response")
                messages += ({"role": "assistant", "content": answer},)
        else:
            key = self.names.get("messages", kind)
            entries = record.get(key)
            if isinstance(entries, dict):  # a list of objects as some tables hold it
                columns = [list(column) for column in entries.values()]
                rows = zip(*columns, strict=True)
                entries = [dict(zip(entries, row, strict=True)) for row in rows]
            if not isinstance(entries, list) or not entries:
                raise ValueError("its messages are not a list with at least one message")
            messages = tuple(self._message(entry, i) for i, entry in enumerate(entries, start=1))
        system = self._get(record, "system")
        if isinstance(system, str) and system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
        _check_turns([message["role"] for message in messages])
        return messages

    def _message(self, entry: Any, number: int) -> Mapping[str, Any]:
        if not isinstance(entry, dict):
            raise ValueError(f"message {number} is {type(entry).__name__}, not an object")
        role_names, content_names = (
            (self._name(ours), other) for ours, other in (("role", "from"), ("content", "value"))
        )
        role = next((entry[name] for name in role_names if entry.get(name) is not None), None)
        content = next((entry[n] for n in content_names if entry.get(n) is not None), None)
        if role == "function_call":
            return _function_call(_text(content, f"content of message {number}"), number)
        role = _ALIASES.get(role, role) if isinstance(role, str) else role
        if role not in _ROLES:
            raise ValueError(f"message {number} has the role {role!r}, not {', '.join(_ROLES)}")
        taken = (*role_names, *content_names)
        # A table has every key in every row, null where a message has none of it.
        others = {k: v for k, v in entry.items() if k not in taken and v is not None}
        if others.get("tool_calls"):
            others["tool_calls"] = _tool_calls(others["tool_calls"], number)
            content = "" if content is None else content
        content = _joined(content, number)
        return {"role": role, "content": _text(content, f"content of message {number}"), **others}


def read_data(settings: DataSettings, seed: int, rejects: Rejects) -> list[Conversation]:
    """The conversations of `settings.source`; the first `settings.limit` of them, 0 = all.

    Rows that are no conversations, and (data.duplicates=bad) those that another one repeats, go to
    `rejects`. Raises DataError where a part cannot be read or no conversation is found.
    """
    form, parts = Form.of(settings), parts_of(settings.source)
    shuffled = settings.order == "shuffled" or (settings.order == "auto" and len(parts) > 1)
    limit = settings.limit or None
    found = list(
        itertools.islice(
            _conversations(parts, form, settings, rejects), None if shuffled else limit
        )
    )
    if not found:
        bad = rejects.problems
        first = f": all {len(bad)} rows are bad, the first: {bad[0]}" if bad else ": it is empty"
        raise DataError(f"{settings.source} holds no conversation{first}")
    if shuffled:
        random.Random(stable_seed(seed, "rows")).shuffle(found)
    return found[:limit]


def _conversations(
    parts: Sequence[str], form: Form, settings: DataSettings, rejects: Rejects
) -> Iterator[Conversation]:
    seen: dict[bytes, str] = {}
    for part in parts:
        for path, number, content in iter_rows(part, settings):
            try:
                if isinstance(content, DataError):
                    raise content
                conversation = form.conversation(content, path, number)
                if settings.duplicates == "bad":
                    _check_new(conversation, seen, path, number)
            except DataError as error:
                rejects.add(error)
                continue
            yield conversation


def _check_new(conversation: Conversation, seen: dict[bytes, str], path: str, number: int) -> None:
    content = (conversation.messages, conversation.tools, conversation.text)
    text = json.dumps(content, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    first = seen.setdefault(digest, conversation.origin)
    if first is not conversation.origin:
        raise DataError(
            f"the same conversation as {first}: it could be trained on and held out at once; "
            "remove it, data.on_bad=skip, or data.duplicates=keep",
            path,
            number,
            kind="duplicate",
        )


def _check_turns(roles: Sequence[str]) -> None:
    if "user" not in roles:
        raise ValueError("it has no message of the user")
    if "assistant" in roles[: roles.index("user")]:
        raise ValueError("the assistant speaks before the user")
    if roles[-1] == "system":
        raise ValueError("it ends with a system message")
    if any(a == b == "assistant" for a, b in itertools.pairwise(roles)):
        raise ValueError("the assistant speaks twice in a row")


def _function_call(content: str, number: int) -> Mapping[str, Any]:
    """ShareGPT's form of a call: the function's name and arguments as JSON text."""
    try:
        call = json.loads(content)
        call = {"name": call["name"], "arguments": call["arguments"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"message {number} is a function call that is no JSON with name and arguments"
        ) from None
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": _tool_calls([{"type": "function", "function": call}], number),
    }


def _tool_calls(calls: Any, number: int) -> list[Any]:
    """Calls with their arguments as an object: templates write them as JSON, text would be quoted
    once more."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"the tool_calls of message {number} are no list of objects")
    found = []
    for call in calls:
        inner = call.get("function", call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(f"a tool call of message {number} names no function")
        if isinstance(inner.get("arguments"), str):
            try:
                inner = {**inner, "arguments": json.loads(inner["arguments"])}
            except ValueError:
                raise ValueError(
                    f"the arguments of a tool call of message {number} are no JSON"
                ) from None
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


def _joined(content: Any, number: int) -> Any:
    """Content in parts, as servers take it, as one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"message {number} has a part that is no text ({kind})")
        texts.append(part["text"])
    return "".join(texts)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the {name} is {type(value).__name__}, not text")
    if not value.strip() and name in ("prompt", "text"):
        raise ValueError(f"the {name} is empty")
    return value


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
