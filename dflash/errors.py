"""Everything that can go wrong in dflash, as one tree.

::

    DFlashError
    ├── ConfigError        a setting or an argument that cannot work
    ├── DataError          a conversation or a sequence that cannot be used (path, line)
    ├── TargetError        the target model is missing or is of an unknown kind
    ├── CheckpointError    a drafter on disk is damaged, or belongs to another target
    ├── GenerationError    text cannot be generated as asked
    └── WorkerFailed       a thread of the run died (thread_name, cause)
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DFlashError",
    "DataError",
    "GenerationError",
    "TargetError",
    "WorkerFailed",
]


class DFlashError(Exception):
    """Base of all errors that dflash raises on purpose."""


class ConfigError(DFlashError):
    """A setting or an argument has a value that cannot work; the text names the way out."""


class DataError(DFlashError):
    """A conversation or a sequence cannot be used.

    ``path`` and ``line`` (1-based; the row, in a table) say where it came from; either is None
    where there is no file. ``kind`` is the fault without its particulars, for counting.
    """

    def __init__(
        self,
        message: str,
        path: str | Path | None = None,
        line: int | None = None,
        *,
        kind: str = "unusable",
    ) -> None:
        self.path = None if path is None else Path(path)
        self.line = line
        self.kind = kind
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{place}{message}")


class TargetError(DFlashError):
    """The target model cannot be found, loaded, or tapped."""


class CheckpointError(DFlashError):
    """A drafter on disk is damaged, has other tensors than expected, or is for another target."""


class GenerationError(DFlashError):
    """A generation call cannot be carried out (empty prompt, mismatched drafter, bad limits)."""


class WorkerFailed(DFlashError):
    """A thread of the run failed; ``cause`` is its exception and ``thread_name`` its name."""

    def __init__(self, thread_name: str, cause: BaseException) -> None:
        self.thread_name = thread_name
        self.cause = cause
        first_line = str(cause).strip().partition("\n")[0]
        super().__init__(f"thread {thread_name!r} failed: {type(cause).__name__}: {first_line}")
