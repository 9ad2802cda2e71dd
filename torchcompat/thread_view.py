"""What each thread does with the compiler now: for the moment in which a job seems to hang.

Imports no torch, waits for nobody, and takes no lock that a stopped thread could hold: all that it
needs is imported with this module, and it writes to descriptors, not to file objects.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import CodeType
from typing import Any, Final, NamedTuple

from torchcompat import stacks
from torchcompat.activity import Entry, Kind, entries
from torchcompat.errors import ConfigError

#: Frames kept of each thread, innermost first.
TOP: Final = 5
_OWNER: Final = re.compile(r"\bowner=(\d+)\b")
_SAID: Final[dict[Kind, str]] = {
    "wait_compile": "waits to compile",
    "wait_backward": "waits to compile the backward of",
    "wait_gate": "waits at the gate of",
    "wait_calls": "waits for compiled calls to end, for",
    "wait_import": "waits for the import of",
    "backward": "compiles the backward of",
    "compile": "compiles",
    "export": "exports",
    "make_fx": "traces with make_fx",
    "fx": "traces with fx",
    "compiled_call": "runs compiled code",
    "other": "other",
}
_WAITS: Final = frozenset(k for k in _SAID if k.startswith("wait_"))


@dataclass(frozen=True)
class ThreadView:
    """One thread. `kind` as in `torchcompat.activity`; `what` it works on or wants; `seconds` since
    when (None where only the frames tell); `holder` the thread that it waits for."""

    ident: int
    name: str
    kind: Kind
    what: str
    seconds: float | None
    holder: int | None
    holder_does: str
    frames: tuple[str, ...]

    @property
    def waits(self) -> bool:
        return self.kind in _WAITS

    @property
    def does(self) -> str:
        """One sentence without a subject."""
        text = f"{_SAID[self.kind]} {self.what}".strip()
        return f"{text}; {self.holder_does}" if self.holder_does else text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"frames": list(self.frames), "waits": self.waits}


@dataclass(frozen=True)
class Threads:
    """All threads of the process, those that wait for others first."""

    threads: tuple[ThreadView, ...]

    def __iter__(self) -> Iterator[ThreadView]:
        return iter(self.threads)

    def __len__(self) -> int:
        return len(self.threads)

    def __getitem__(self, ident: int) -> ThreadView:
        """By thread number. Raises `KeyError`."""
        for view in self.threads:
            if view.ident == ident:
                return view
        raise KeyError(ident)

    @property
    def circles(self) -> tuple[tuple[str, ...], ...]:
        """The names of threads that wait for each other: none of them will go on."""
        holder = {v.ident: v.holder for v in self.threads if v.waits}
        names = {v.ident: v.name for v in self.threads}
        found: dict[frozenset[int], tuple[str, ...]] = {}
        for start in holder:
            path: list[int] = []
            at: int | None = start
            while at in holder and at not in path:
                path.append(at)
                at = holder[at]
            if at in path:
                circle = path[path.index(at) :]
                found.setdefault(frozenset(circle), tuple(names[i] for i in circle))
        return tuple(found.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "threads": [view.to_dict() for view in self.threads],
            "circles": [list(circle) for circle in self.circles],
        }

    def __str__(self) -> str:
        width = max((len(v.name) for v in self.threads), default=0)
        lines = [f"{len(self)} threads"]
        for circle in self.circles:
            lines.append(f"wait for each other, for ever: {' -> '.join((*circle, circle[0]))}")
        for view in self.threads:
            seconds = "       -" if view.seconds is None else f"{view.seconds:6.1f} s"
            lines.append(f"{view.name:<{width}}  {seconds}  {view.does}")
            lines += [f"    {frame}" for frame in view.frames]
        return "\n".join(lines)


def threads() -> Threads:
    """What each Python thread does with the compiler now.

    Facts of applied patches say who waits for what since when; without them the stacks tell the
    kind of each wait, and torch's lock its holder. Changes nothing and imports nothing.
    """
    descriptor = stacks.scratch()
    try:
        return _look(descriptor)
    finally:
        os.close(descriptor)


def _look(descriptor: int) -> Threads:
    said, now = entries(), time.monotonic()
    seen = stacks.read(descriptor)
    imports = _import_waits(list(seen))
    me = threading.get_ident()
    views = []
    for ident in dict.fromkeys([*seen, *(i for i in said if i in sys._current_frames())]):
        frames = seen.get(ident, [])
        if ident == me:
            frames = [f for f in frames if not _is_this(f)]
        facts = _facts(ident, frames, said.get(ident, ()), imports.get(ident))
        seconds = None if facts.since is None else round(max(now - facts.since, 0.0), 1)
        top = tuple(map(str, frames[:TOP]))
        holder = None if facts.holder == ident else facts.holder
        if facts.kind == "wait_calls":
            holder = next(
                (i for i, f in seen.items() if i != ident and _is_in_call(i, f, said)), holder
            )
        name = _name(ident)
        views.append(ThreadView(ident, name, facts.kind, facts.what, seconds, holder, "", top))
    by_ident = {view.ident: view for view in views}
    complete = [replace(v, holder_does=_about_holder(v, by_ident)) for v in views]
    return Threads(tuple(sorted(complete, key=lambda v: (not v.waits, v.kind == "other"))))


class _Facts(NamedTuple):
    kind: Kind
    what: str
    since: float | None
    holder: int | None


def _facts(
    ident: int,
    frames: list[stacks.Frame],
    said: tuple[Entry, ...],
    import_wait: tuple[str, int | None] | None,
) -> _Facts:
    """What is known of one thread; an import that it waits for is its innermost wait."""
    if stacks.is_at_import_lock(frames):
        name, holder = import_wait or ("a module", None)
        since = said[-1].since if said and said[-1].kind == "wait_import" else None
        return _Facts("wait_import", name, since, holder)
    if said:
        entry = said[-1]
        return _Facts(entry.kind, _described(entry.what), entry.since, _holder(entry.holder))
    kind, index = stacks.kind_of(frames)
    if stacks.is_at_compile_lock(frames):
        holder = _holder(_compile_lock())
        if holder not in (None, ident):
            return _Facts("wait_compile", _called_at(frames, 0), None, holder)
    what = "" if kind in ("other", "compiled_call") else _called_at(frames, index)
    return _Facts(kind, what, None, None)


def _about_holder(view: ThreadView, all_views: dict[int, ThreadView]) -> str:
    """What the one that `view` waits for does; the point of it all."""
    if view.holder is None:
        return "nobody known has it" if view.waits and view.kind != "wait_calls" else ""
    other = all_views.get(view.holder)
    if other is None:
        return f"thread {view.holder} has it, which has no Python stack"
    if (
        other.kind in ("compile", "backward")
        and other.what == view.what
        and "called" not in view.what
    ):
        return f"{other.name} compiles the same"
    return f"{other.name} {other_text(other)}"


def other_text(other: ThreadView) -> str:
    """For a thread that is in the way."""
    text = f"{_SAID[other.kind]} {other.what}".strip()
    return "has it" if other.kind == "other" else text


def _described(what: Any) -> str:
    if isinstance(what, CodeType):
        name = getattr(what, "co_qualname", what.co_name)
        return f"{name} ({what.co_filename}:{what.co_firstlineno})"
    return str(what)


def _called_at(frames: list[stacks.Frame], index: int) -> str:
    frame = stacks.caller(frames, index)
    return "" if frame is None else f"what is called at {frame}"


def _compile_lock() -> Any:
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def _holder(lock: Any) -> int | None:
    """The thread that has `lock`. An RLock tells it in its repr, and nowhere else."""
    if lock is None or isinstance(lock, int):
        return lock
    match = _OWNER.search(repr(lock))
    return (int(match[1]) or None) if match else None


def _import_waits(idents: list[int]) -> dict[int, tuple[str, int | None]]:
    """By thread the module whose import it waits for, and the thread that imports it."""
    # `importlib._bootstrap` is the frozen one, which does not appear under that name before
    # `importlib` itself is imported.
    blocking: Any = getattr(sys.modules.get("_frozen_importlib"), "_blocking_on", None)
    found: dict[int, tuple[str, int | None]] = {}
    for ident in idents if blocking is not None else ():
        lock = blocking.get(ident)
        lock = lock[-1] if isinstance(lock, list) and lock else lock  # a list from 3.12 on
        if hasattr(lock, "name"):
            found[ident] = (str(lock.name), getattr(lock, "owner", None))
    return found


def _name(ident: int) -> str:
    # threading.enumerate() takes a lock.
    thread = getattr(threading, "_active", {}).get(ident)
    return f"thread {ident}" if thread is None else str(thread.name)


def _is_in_call(ident: int, frames: list[stacks.Frame], said: dict[int, tuple[Entry, ...]]) -> bool:
    """Whether a reset waits for this thread: in a compiled call, and not itself before the gate."""
    at_gate = any(entry.kind in ("wait_gate", "wait_calls") for entry in said.get(ident, ()))
    return not at_gate and stacks.is_in_compiled_call(frames)


def _is_this(frame: stacks.Frame) -> bool:
    return frame.is_in("torchcompat/thread_view.py") or frame.is_in("torchcompat/stacks.py")


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


def _descriptor_of(file: Any) -> int:
    """Raises `ConfigError` for what has none."""
    target = sys.stderr if file is None else file
    try:
        return int(target if isinstance(target, int) else target.fileno())
    except (AttributeError, OSError, ValueError):
        raise ConfigError(
            f"{target!r} has no file descriptor to write to from a signal handler: "
            "give an open file or a number"
        ) from None


def _number(name: str | int) -> int:
    number = getattr(signal, name, None) if isinstance(name, str) else name
    if not isinstance(number, int) or not 0 < number < signal.NSIG:
        raise ConfigError(f"{name!r} is no signal here: give a name such as 'SIGUSR2', or a number")
    return int(number)


def threads_on_signal(signum: str | int = "SIGUSR2", file: Any = None) -> Callable[[], None]:
    """Write `threads()` whenever the process gets the signal: `kill -USR2 PID`.

    `file` is a descriptor or an open file, standard error by default. Gives a function that takes
    the handler back.

    A handler that was there is called after. To be called in the main thread, which also runs the
    handler, between two steps of its Python code: a main thread that waits for a lock answers, one
    that stands in C code does so when it comes back (`threads_every` does not need it).
    Raises `ConfigError` for an unknown signal, a file without descriptor, or another thread.
    """
    number, target = _number(signum), _descriptor_of(file)
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("threads_on_signal() must be called in the main thread, as Python wants")
    descriptor = stacks.scratch()
    before = signal.getsignal(number)

    def handle(received: int, frame: Any) -> None:
        _write(target, f"{_look(descriptor)}\n")
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)

    def undo() -> None:
        if signal.getsignal(number) is handle:
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.close(descriptor)

    return undo


def threads_every(seconds: float, file: Any = None) -> Callable[[], None]:
    """Write `threads()` to `file` every `seconds` while a thread waits for another that long.

    A thread of its own does it, so it needs no main thread that answers. TORCHCOMPAT_DUMP=seconds
    has `apply()` begin it. Gives a function that ends it.

    Raises `ConfigError` for a time that is none, or a file without descriptor.
    """
    if not seconds > 0:
        raise ConfigError(f"{seconds!r} is no number of seconds above 0")
    target = _descriptor_of(file)
    over = threading.Event()

    def watch() -> None:
        waited: set[tuple[int, Kind, str]] = set()
        while not over.wait(seconds):
            view = threads()
            waits = {(v.ident, v.kind, v.what) for v in view if v.waits}
            long = any(v.waits and (v.seconds or 0) >= seconds for v in view)
            if long or waits & waited:
                _write(target, f"{view}\n")
            waited = waits

    threading.Thread(target=watch, name="torchcompat-threads", daemon=True).start()
    return over.set


_watched: Final[list[Callable[[], None]]] = []


def watch_as_told(environ: Any = None) -> None:
    """Begin `threads_every` as TORCHCOMPAT_DUMP says, once. Raises `ConfigError`."""
    text = (os.environ if environ is None else environ).get("TORCHCOMPAT_DUMP", "").strip()
    if not text or _watched:
        return
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"TORCHCOMPAT_DUMP is {text!r}; it must be a number of seconds") from None
    _watched.append(threads_every(seconds))
