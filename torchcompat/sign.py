"""How a hazard shows in a log: a `Sign` for each message, a `Hazard` where there is no patch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

SignKind = Literal["error", "log", "dump"]

_ID: Final = re.compile(r"([A-Za-z0-9_.-]+:)?[a-z][a-z0-9_]*")
_LITERAL_MIN: Final = 12  # characters of plain text that a message must have to stand for itself
_QUANTIFIERS: Final = "?*{"


@dataclass(frozen=True)
class Frame:
    """A place in a stack: "file suffix:function". Both may be alternatives, "a.py|b.py:f|g", and
    `*` stands for anything."""

    file: re.Pattern[str]
    function: re.Pattern[str]

    @classmethod
    def parse(cls, text: str) -> Frame:
        """Raises `ValueError` for another form."""
        files, functions = split_frame(text)
        return cls(re.compile(rf"(?:.*/)?(?:{_glob(files)})"), re.compile(_glob(functions)))

    def fits(self, file: str, function: str) -> bool:
        """Whether a frame of a stack is this place; `file` has forward slashes."""
        return bool(self.function.fullmatch(function) and self.file.fullmatch(file))


def split_frame(text: str) -> tuple[str, str]:
    """Files and functions of a frame's text. Raises `ValueError` for another form."""
    files, colon, functions = text.rpartition(":")
    if not colon or "" in (*files.split("|"), *functions.split("|")):
        raise ValueError(f"frame {text!r} is not of the form 'path/file.py:function'")
    return files, functions


def _glob(text: str) -> str:
    return re.escape(text).replace(r"\|", "|").replace(r"\*", ".*")


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One way in which a hazard shows.

    `text` is a regular expression for what was raised, "Type: message" (kind `error`), for a log
    record or warning (`log`), or for the head of a dump of stacks (`dump`: "Fatal Python error:
    Segmentation fault", "Timeout (0:05:00)!", or empty). It is searched in all lines, `^` and `$`
    are those of a line.

    `frames` must all be in the same stack, `raised_in` must be its innermost frame (`source` a text
    in that frame's line, where the log has it), and none of `absent` may be in it. `beside`: frames
    of another thread in the same dump. `elsewhere`: plain text that must be somewhere in the log.
    `in_thread`: raised in a thread that is not the main one, by the frames or by what the log calls
    the thread. Not `sure`: the same text has other causes too.

    Raises `ValueError` where the sign cannot be right, or is so general that it would match
    anything: without frames the text must hold twelve plain characters in a row.
    """

    text: str
    kind: SignKind = "error"
    frames: tuple[str, ...] = ()
    raised_in: str | None = None
    source: str = ""
    absent: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    elsewhere: str = ""
    in_thread: bool = False
    sure: bool = True

    def __post_init__(self) -> None:
        for frame in (*self.frames, *self.absent, *self.beside, self.raised_in or "*:*"):
            split_frame(frame)
        if self.kind not in ("error", "log", "dump"):
            raise ValueError(f"sign {self.text!r}: kind {self.kind!r} is not error, log or dump")
        if self.kind == "log" and (self.needs_stack or self.absent):
            raise ValueError(f"sign {self.text!r}: a log record has no frames")
        if self.kind == "dump" and not self.needs_stack:
            raise ValueError(f"sign {self.text!r}: a dump is known by its frames")
        if self.beside and self.kind != "dump":
            raise ValueError(f"sign {self.text!r}: beside is for dumps")
        if not self.needs_stack and len(self.literal) < _LITERAL_MIN:
            raise ValueError(
                f"sign {self.text!r}: too general; give frames, or a text with {_LITERAL_MIN} "
                "plain characters in a row"
            )

    @property
    def needs_stack(self) -> bool:
        """Whether the text alone, outside a traceback, says nothing."""
        return bool(self.frames) or self.raised_in is not None or self.in_thread

    @cached_property
    def literal(self) -> str:
        """The longest plain text that everything that `text` matches contains; may be empty."""
        return longest_literal(self.text)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """`text`, ready to be searched. Raises `ValueError` where it is no regular expression: not
        before, because compiling takes time, and every process that applies patches would pay."""
        try:
            return re.compile(self.text, re.MULTILINE)
        except re.error as e:
            raise ValueError(f"sign {self.text!r}: no regular expression: {e}") from None

    @cached_property
    def places(self) -> tuple[Frame, ...]:
        return tuple(map(Frame.parse, self.frames))

    @cached_property
    def innermost(self) -> Frame | None:
        return None if self.raised_in is None else Frame.parse(self.raised_in)

    @cached_property
    def excluded(self) -> tuple[Frame, ...]:
        return tuple(map(Frame.parse, self.absent))

    @cached_property
    def others(self) -> tuple[Frame, ...]:
        return tuple(map(Frame.parse, self.beside))


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """A known fault without a patch: what it is, how it shows, and what to do about it.

    A module whose entry point gives patches may hold `HAZARDS`, a sequence of them. One with the id
    of a patch adds its signs to that patch. Raises `ValueError` where a field cannot be right.
    """

    id: str
    title: str
    advice: str
    signs: tuple[Sign, ...]

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"hazard id {self.id!r}: lower case, digits and _, after 'plugin:'")
        if not self.title or not self.advice:
            raise ValueError(f"hazard {self.id!r}: title and advice must say something")
        check_signs(f"hazard {self.id!r}", self.signs)


def check_signs(owner: str, signs: object) -> None:
    """Raises `ValueError` for anything but a tuple of `Sign`."""
    if not isinstance(signs, tuple) or not all(isinstance(s, Sign) for s in signs):
        raise ValueError(f"{owner}: signs must be a tuple of Sign")


def longest_literal(pattern: str) -> str:
    """The longest run of plain characters that every match of a regular expression contains.

    Groups are passed over, and a pattern with alternatives outside groups has none: too short is
    safe here, too long is not.
    """
    runs, run, depth, i = [], "", 0, 0
    while i < len(pattern):
        char, step, plain = pattern[i], 1, False
        if char == "\\":
            step = 2
            char = pattern[i + 1] if i + 1 < len(pattern) else ""
            plain = bool(char) and not char.isalnum()
        elif char == "[":
            step = _class_length(pattern[i:])
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return ""
        else:
            plain = char not in ".^$*+?{}|]"
        following = pattern[i + step : i + step + 1]
        optional = following != "" and following in _QUANTIFIERS
        if plain and depth == 0 and not optional:
            run += char
        if not plain or depth or optional or following == "+":
            runs.append(run)
            run = ""
        if char == "{" and not plain:
            step = pattern[i:].find("}") + 1 or 1
        i += step
    return max([*runs, run], key=len)


def _class_length(pattern: str) -> int:
    """How long the character class is that `pattern` begins with."""
    i = 2 if pattern[1:2] == "^" else 1
    i += 1 if pattern[i : i + 1] == "]" else 0
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1
