"""What the reproducers share: bounded waits, threads that keep their error, one closing line.

A reproducer imports this first. With TORCHCOMPAT_REPRO_APPLY=1 the patches are applied, at the
moment that the program asks for with `apply_patches()`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

# Run as a script, this file's folder leads sys.path; nothing of it may shadow a real module.
WAIT_S = 30.0
faulthandler.enable()
faulthandler.dump_traceback_later(100, exit=True)  # a hang ends with every thread's stack


def apply_patches(*ids: str) -> None:
    """Apply the patches named `ids`, if this run is the one with patches."""
    if os.environ.get("TORCHCOMPAT_REPRO_APPLY") == "1":
        import torchcompat

        torchcompat.apply(only=list(ids))


def apply_always(*ids: str) -> None:
    """Apply patches whose fault would hide the one at hand, in both runs."""
    import torchcompat

    torchcompat.apply(only=list(ids))


def warm_up() -> None:
    """CUDA builds up to 2.11 on a machine without a GPU crash unless the first compile is ours."""
    import torch

    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))


class Worker(threading.Thread):
    """A started thread with its result or exception."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as e:
            self.error = e

    def finish(self) -> Worker:
        """Wait for the end; a thread that does not come is the fault."""
        self.join(WAIT_S)
        if self.is_alive():
            verdict([f"a thread is stuck after {WAIT_S:.0f} s"])
        return self


def first_line(error: BaseException | None) -> str:
    """`Type: first line` of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def not_applicable(reason: str) -> NoReturn:
    """End where this torch has nothing of the kind."""
    print(f"does not apply: {reason}", flush=True)
    os._exit(2)


def verdict(faults: list[str]) -> NoReturn:
    """Print the closing line and end at once, also where a thread is stuck."""
    import torch

    what = "; ".join(faults) if faults else "right"
    print(f"torch {torch.__version__}: {what}", flush=True)
    sys.stdout.flush()
    os._exit(1 if faults else 0)
