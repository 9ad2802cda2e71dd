"""A log as lines: bounded memory, where each came from, and what is left without the prefixes."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from torchcompat.errors import ConfigError

_BLOCK: Final = 1 << 18  # bytes read at once
_LINE_MAX: Final = 1 << 16  # of a longer line the rest is passed over

_ANSI: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# Who wrote the line: torch's and torchrun's [rank3]: and [default3]:, mpirun's [1,3]<stderr>:,
# Ray's and vLLM's (Worker pid=12), srun's 3:, docker compose's worker-1  |.
_WHO: Final = re.compile(
    r"\[(?:[Rr]ank|RANK|default|node|[Ww]orker|proc|gpu|GPU|local_rank)?[ =:]?\d+\](?::|(?=\s))"
    r"|\[\d+,\d+\]<std(?:err|out)>:"
    r"|\((?:[\w.:<>-]+[ ])*?pid=\d+(?:,[^)]*)?\)"
    r"|(?:[Rr]ank|RANK|[Ww]orker|[Nn]ode|gpu|GPU)[ _=:-]?\d+\s?[:|](?=\s|$)"
    r"|\s{0,4}\d{1,5}:(?=\s|$)"
    r"|[A-Za-z][\w.]*(?:-[\w.]+)*-\d+\s*\|(?=\s|$)"
)
# What loggers put first: torch's W1203 10:22:33.444000 7031 torch/x.py:12] [0/8] [__recompiles],
# a date, a time, a level with logger names, vLLM's ERROR 12-03 10:22:33 [core.py:700].
_RECORD: Final = re.compile(
    r"[VDIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?\S+?:\d+\] ?(?:\[[\d!/_]+\] ?)?(?:\[__\w+\] ?)?"
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?"
    r"(?: std(?:err|out) [FP](?= ))?"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?"
    r"|\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?"
    r"(?: \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)?(?: \[[^\]\s]+:\d+\])?(?::[\w.]+:|:)?"
    r"|\[[\w.-]+\.\w+:?\d*\]"  # [trainer.py:12] after a date
)
_SEPARATOR: Final = re.compile(r"[ ](?:[-|:][ ])?(?:[\w.]+ - )*")
_THREAD: Final = re.compile(
    r"\[(?P<bracket>(?!Errno)[A-Za-z][\w .()-]*(?<!\.py))\]"
    r"|\b(?P<plain>MainThread|Thread-\d+(?: \(\w+\))?|ThreadPoolExecutor-\d+_\d+|Dummy-\d+)\b"
)
_ROUNDS: Final = 5


class CutShort(ConfigError):
    """The rest of a log cannot be read."""


@dataclass(frozen=True)
class Line:
    """One line. `who` is its rank or worker prefix, `thread` what the logger's prefix says of the
    thread, `text` what is left; `dated` if a logger's prefix was taken off."""

    number: int
    who: str
    thread: str
    text: str
    dated: bool


def read_line(number: int, raw: bytes) -> Line:
    """Take one raw line apart."""
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:  # a progress bar, written over: the last state counts
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    who: list[str] = []
    thread, dated = "", False
    for _ in range(_ROUNDS):
        if text[:2] == "  " and not text[2:6].lstrip()[:1].isdigit():
            break  # a frame or its source: most lines of a traceback
        match = _WHO.match(text)
        if match:
            who.append(match[0].partition("<std")[0].strip("[](): |"))
            text = text[match.end() :]
            text = text[1:] if text.startswith(" ") else text
            continue
        match = _RECORD.match(text)
        if match is None or match.end() == 0:
            break
        dated = True
        rest = text[match.end() :]
        if not match[0].endswith(" ") and (gap := _SEPARATOR.match(rest)):
            rest = rest[gap.end() :]
        named = _THREAD.match(rest) or _THREAD.search(match[0])
        if named and not thread:
            thread = named["bracket"] or named["plain"]
            if rest.startswith(named[0]):
                rest = rest[len(named[0]) :].removeprefix(":").removeprefix(" ")
        text = rest
    return Line(number, " ".join(who), thread, text, dated)


def open_log(name: str) -> IO[bytes]:
    """The log's bytes; `-` is standard input. Raises `ConfigError` for what cannot be read."""
    if name == "-":
        return sys.stdin.buffer
    try:
        if name.endswith(".gz"):
            return cast("IO[bytes]", gzip.open(name))
        return Path(name).open("rb")
    except OSError as e:
        raise ConfigError(f"log {name!r} cannot be read: {e.strerror or e}") from None


def blocks(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Whole lines, many at a time. Raises `CutShort`, after what came before, where the file cannot
    be read to its end, such as a gzip file of a job that was killed."""
    rest = b""
    while True:
        try:
            data = stream.read(_BLOCK)
        except (OSError, EOFError, zlib.error) as e:
            if rest:
                yield rest
            raise CutShort(f"log {name!r} cannot be read to its end: {e}") from None
        if not data:
            break
        if b"\n" not in data:
            rest += data[: max(0, _LINE_MAX - len(rest))]
            continue
        head, _, tail = data.rpartition(b"\n")
        yield rest + head + b"\n"
        rest = tail[:_LINE_MAX]
    if rest:
        yield rest
