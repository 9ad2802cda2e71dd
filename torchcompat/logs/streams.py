"""Put tracebacks, dumps of stacks and log records together, each from the lines of one stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from torchcompat.logs.lines import Line, read_line

EventKind = Literal["error", "dump", "log"]
_State = Literal["idle", "trace", "message", "dump", "record"]

HEADER: Final = "Traceback (most recent call last)"
_MESSAGE_LINES: Final = 120  # torch's longest errors, with stacks of their own
_RECORD_LINES: Final = 6
_NOISE_LINES: Final = 50  # lines of others in the middle of a traceback
_FRAMES_MAX: Final = 2000  # different ones; a recursion repeats few
_STACKS_MAX: Final = 2000
_STREAMS_MAX: Final = 512
_SILENT_LINES: Final = 5000  # a stream that has said nothing for so long has ended its failure

_FRAME: Final = re.compile(
    r'^(?P<left>.*?)(?P<indent>[ \t]*)File "(?P<file>[^"]+)", line \d+(?:,? in (?P<function>.+))?$'
)
_PY_SPY: Final = re.compile(r"^\s{2,}(?P<function>\S.*?) \((?P<file>[^()]+):\d+\)$")
_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?::(?:\s|$)|$)")
_LIKE_AN_ERROR: Final = re.compile(r"(Error|Exception|Warning|Exit|Interrupt|Group|Hit|Failed)$")
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_DUMP: Final = re.compile(
    r"Fatal Python error: .|Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!"
    r"|(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):"
    r"|Thread \S+ \((?:idle|active)[^)]*\)(?:: \".*\")?$"
)
_THREAD_OF_DUMP: Final = re.compile(r"(?:Current thread|Thread) \S+")
_IN_THREAD: Final = re.compile(r"Exception in thread (?P<name>.+?)(?: \(.*\))?:?$")
_GROUP_MARGIN: Final = re.compile(r"^\s*(?:\|\s?|\+ (?=Exception Group))")


@dataclass
class Stack:
    """Frames of one thread or exception, each (file, function) once. `source` is the text of the
    innermost frame's line, empty if the log does not have it."""

    frames: dict[tuple[str, str], None] = field(default_factory=dict)
    innermost: tuple[str, str] | None = None
    source: str = ""

    def add(self, file: str, function: str) -> None:
        """A frame further in."""
        self.innermost, self.source = (file, function), ""
        if len(self.frames) < _FRAMES_MAX:
            self.frames[file, function] = None

    def add_outer(self, file: str, function: str) -> None:
        """A frame further out, as dumps have them."""
        self.innermost = self.innermost or (file, function)
        if len(self.frames) < _FRAMES_MAX:
            self.frames[file, function] = None


@dataclass
class Part:
    """One exception with its stack, or a dump with the stacks of its threads, or only a text.

    `whole`: the stack is there from its outermost frame on.
    """

    text: str = ""
    stacks: list[Stack] = field(default_factory=list)
    whole: bool = False

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].strip()


@dataclass(frozen=True)
class Event:
    """A failure, a dump or a record; of a chain of exceptions all parts, the last one last.

    `in_full`: a traceback or a dump, not just a message in a line.
    """

    kind: EventKind
    number: int
    who: str
    thread: str
    parts: tuple[Part, ...]
    in_full: bool

    def describe(self) -> str:
        """What it is, in one line."""
        last = self.parts[-1]
        innermost = last.stacks[0].innermost if last.stacks else None
        at = f"{innermost[1]} in {innermost[0]}" if innermost else "no frame"
        if self.kind == "dump":
            return last.title or f"a dump of the stacks of {len(last.stacks)} threads"
        if not last.title:
            return f"a traceback that ends before its exception; its last frame is {at}"
        is_bare = innermost is not None and " " not in last.title
        return f"{last.title} (raised by {at})" if is_bare else last.title


@dataclass
class _Stream:
    who: str
    state: _State = "idle"
    number: int = 0
    last: int = 0
    thread: str = ""
    parts: list[Part] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    column: int = 0
    headed: bool = False
    dated: bool = False
    group: bool = False
    chained: bool = False
    noise: int = 0


class Assembler:
    """Gets lines, in order; gives events to `emit`. `loose` and `records` are the plain texts that
    matter outside tracebacks: alone, and as the beginning of a record of several lines."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        loose: Sequence[str] = (),
        records: Sequence[str] = (),
    ) -> None:
        self._emit = emit
        self._loose = tuple(loose)
        self._records = tuple(records)
        self._open: dict[tuple[str, str], _Stream] = {}
        self._look_again = 0

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to something that has begun."""
        return bool(self._open)

    def feed(self, line: Line, before: bytes = b"") -> None:
        """One line, and the raw one before it, which may name the thread."""
        key = (line.who, line.thread)
        stream = self._open.get(key)
        if stream is None:
            stream = _Stream(line.who)
        self._step(stream, line, before)
        stream.last = line.number
        if stream.state == "idle":
            self._open.pop(key, None)
        else:
            self._open[key] = stream
            if len(self._open) > _STREAMS_MAX:
                self._end(self._open.pop(next(iter(self._open))))
        if line.number >= self._look_again:
            self._look_again = line.number + _SILENT_LINES // 5
            self.end_silent(line.number)

    def end_silent(self, number: int) -> None:
        """End what has had no line for long."""
        for key in [k for k, s in self._open.items() if number - s.last > _SILENT_LINES]:
            self._end(self._open.pop(key))

    def end(self) -> None:
        """The log is over."""
        while self._open:
            self._end(self._open.pop(next(iter(self._open))))

    # -- one line in one stream

    def _step(self, stream: _Stream, line: Line, before: bytes) -> None:
        text = line.text[stream.column :] if stream.column else line.text
        if stream.group:
            text = _GROUP_MARGIN.sub("", text)
        if HEADER in text:
            self._header(stream, line, text, before)
        elif stream.state == "trace":
            self._in_trace(stream, line, text)
        elif stream.state == "message":
            self._in_message(stream, line, text, before)
        elif stream.state == "dump":
            self._in_dump(stream, line, text, before)
        elif stream.state == "record":
            self._in_record(stream, line, text, before)
        else:
            self._idle(stream, line, text, before)

    def _header(self, stream: _Stream, line: Line, text: str, before: bytes) -> None:
        joins = stream.chained or stream.group or "Original Traceback" in text
        # Two threads that write to one stream at once cannot be told apart: they are one failure.
        if stream.state == "trace" or (stream.state == "message" and joins):
            self._close_part(stream)
        else:
            self._end(stream)
            self._begin(stream, "trace", line, before)
            stream.dated = line.dated
            stream.group = "Exception Group Traceback" in text
        stream.headed, stream.chained, stream.state, stream.noise = True, False, "trace", 0
        stream.parts.append(Part(stacks=[Stack()], whole=True))

    def _in_trace(self, stream: _Stream, line: Line, text: str) -> None:
        stack = stream.parts[-1].stacks[0]
        if 'File "' in text and (frame := _FRAME.match(text)):
            left = frame["left"]
            if left.strip() and not stream.column:
                stream.column = max(0, frame.start("indent") + len(frame["indent"]) - 2)
            stack.add(frame["file"].replace("\\", "/"), frame["function"] or "")
        elif text[:1] in (" ", "\t") or not text:
            if not stack.source and text.strip("~^ \t"):
                stack.source = text.strip()
        elif (raised := _RAISED.match(text)) and _is_error(raised, stream.headed):
            stream.state, stream.lines = "message", [text]
        else:
            if not stream.headed:  # a stack in a log, of no exception
                self._drop(stream)
                self._alone(line, text)
                return
            self._alone(line, text)
            stream.noise += 1
            if stream.noise > _NOISE_LINES:
                self._end(stream)

    def _in_message(self, stream: _Stream, line: Line, text: str, before: bytes) -> None:
        if text.strip() in _CHAINED:
            stream.chained = True
            return
        foreign = (line.dated and not stream.dated) or any(x in text for x in self._records)
        if foreign or _DUMP.match(text) or len(stream.lines) >= _MESSAGE_LINES:
            self._end(stream)
            self._idle(stream, line, line.text, before)
        else:
            stream.lines.append(text)

    def _in_dump(self, stream: _Stream, line: Line, text: str, before: bytes) -> None:
        part = stream.parts[-1]
        if _THREAD_OF_DUMP.match(text) and _DUMP.match(text):
            if len(part.stacks) < _STACKS_MAX:
                part.stacks.append(Stack())
        elif _DUMP.match(text):
            self._end(stream)
            self._idle(stream, line, text, before)
        elif (frame := _FRAME.match(text) or _PY_SPY.match(text)) and part.stacks:
            part.stacks[-1].add_outer(frame["file"].replace("\\", "/"), frame["function"] or "")
        elif text[:1] not in ("", " ", "\t", "<") and not text.startswith("Python runtime state"):
            self._end(stream)
            self._idle(stream, line, text, before)

    def _in_record(self, stream: _Stream, line: Line, text: str, before: bytes) -> None:
        if text[:1] in (" ", "\t") and len(stream.lines) < _RECORD_LINES:
            stream.lines.append(text)
        else:
            self._end(stream)
            self._idle(stream, line, text, before)

    def _idle(self, stream: _Stream, line: Line, text: str, before: bytes) -> None:
        if 'File "' in text and _FRAME.match(text):
            self._begin(stream, "trace", line, before)
            stream.dated = line.dated
            stream.parts.append(Part(stacks=[Stack()]))
            self._in_trace(stream, line, text)
        elif _DUMP.match(text):
            self._begin(stream, "dump", line, before)
            is_thread = _THREAD_OF_DUMP.match(text)
            head = "" if is_thread else text.strip()
            stream.parts.append(Part(head, [Stack()] if is_thread else [], whole=True))
        elif any(literal in text for literal in self._records):
            self._begin(stream, "record", line, before)
            stream.lines = [text]
        else:
            self._alone(line, text)

    def _alone(self, line: Line, text: str) -> None:
        """A line of no traceback: a known message may be all that there is."""
        if any(literal in text for literal in self._loose):
            part = Part(text.strip())
            self._emit(Event("error", line.number, line.who, line.thread, (part,), False))

    # -- beginnings and ends

    def _begin(self, stream: _Stream, state: _State, line: Line, before: bytes) -> None:
        stream.state, stream.number, stream.thread = state, line.number, line.thread
        previous = read_line(line.number - 1, before)
        if previous.who == line.who and not stream.thread:
            named = _IN_THREAD.search(previous.text)
            stream.thread = named["name"] if named else previous.thread

    def _close_part(self, stream: _Stream) -> None:
        if stream.parts and stream.lines:
            stream.parts[-1].text = "\n".join(stream.lines).rstrip()
        stream.lines = []

    def _end(self, stream: _Stream) -> None:
        """Emit what the stream has, if it is anything, and make it idle."""
        state = stream.state
        if state == "record":
            parts = [Part("\n".join(stream.lines))]
            event = Event("log", stream.number, stream.who, stream.thread, tuple(parts), False)
            self._drop(stream)
            self._emit(event)
            return
        self._close_part(stream)
        parts = stream.parts
        number, thread, headed = stream.number, stream.thread, stream.headed
        self._drop(stream)
        if state == "dump" and (parts[0].stacks or parts[0].text.startswith("Fatal")):
            self._emit(Event("dump", number, stream.who, thread, tuple(parts), True))
        elif state == "message" or (state == "trace" and headed):
            self._emit(Event("error", number, stream.who, thread, tuple(parts), True))

    def _drop(self, stream: _Stream) -> None:
        stream.state, stream.parts, stream.lines, stream.thread = "idle", [], [], ""
        stream.headed = stream.dated = stream.group = stream.chained = False
        stream.column = stream.noise = 0


def _is_error(raised: re.Match[str], headed: bool) -> bool:
    """Whether a line is "Type: message". Under a traceback's header any type will do; where the
    header is cut off, it must look like an error's."""
    name, dotted = raised["name"], "." in raised[0].rstrip(": ")
    if headed:
        return name[0].isupper() or dotted
    return bool(_LIKE_AN_ERROR.search(name)) or (dotted and name[0].isupper())
