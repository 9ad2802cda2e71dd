"""What a run says: progress bars of long stages, where the minutes went, one line per step.

Bars go to stderr: on a terminal one line that redraws itself, elsewhere a line every few seconds.
Everything else goes to stdout through `say`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TextIO


def say(text: str) -> None:
    """One line (or block of lines) of the run's own report."""
    print(text, flush=True)


class ProgressBar:
    """`with ProgressBar("responses", 148, "prompts") as bar: bar.advance(4)`; any thread may."""

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        *,
        stream: TextIO | None = None,
        every: float = 10.0,
    ) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._stream = stream if stream is not None else sys.stderr
        self._redraws = self._stream.isatty()
        self._every = 0.2 if self._redraws else every
        self._lock = threading.Lock()
        self._done = 0
        self._shown = 0
        self._started = self._drawn = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """`count` more are done."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._drawn >= self._every:
                self._drawn = now
                self._draw(now)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._redraws or self._shown != self._done or not self._done:
                self._draw(time.monotonic())
            if self._redraws:
                self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now: float) -> None:
        self._shown = self._done
        text = self._text(now - self._started)
        self._stream.write(f"\r{text}\x1b[K" if self._redraws else f"{text}\n")
        self._stream.flush()

    def _text(self, seconds: float) -> str:
        share = self._done / self._total if self._total else 1.0
        filled = round(24 * min(1.0, share))
        rate = self._done / seconds if seconds > 0 else 0.0
        if self._done < self._total:
            left = duration((self._total - self._done) / rate) if rate else "?"
            time_text = f"{left} left"
        else:
            time_text = f"took {duration(seconds)}"
        bar = "#" * filled + "." * (24 - filled)
        counts = f"{self._done}/{self._total} {self._unit}"
        return f"{self._title} [{bar}] {counts}, {rate:.1f}/s, {time_text}"


class PhaseTimer:
    """Where the minutes went: seconds by phase, in the order of their first start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def rows(self) -> list[tuple[str, str]]:
        """(phase, duration and share), with the sum last."""
        total = sum(self.seconds.values())
        rows = [
            (name, f"{duration(seconds)}  {100 * seconds / total if total else 0:.0f} %")
            for name, seconds in self.seconds.items()
        ]
        return [*rows, ("together", duration(total))]


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:30` or `1:02:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Two aligned columns under a title."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {value}".rstrip() for name, value in rows]
    return "\n".join([title, *lines])
