"""compiled_autograd: one compiler of backward graphs for the whole process.

Compiled autograd is switched on by putting a compiler into one place in C that the autograd engines
of all threads read. A second thread that enters such a context, or only runs backward(), while the
first one is inside gets "Trying to run compiled autograd within another compiled autograd call",
"compiled_autograd._enable() requires no threads in backwards()", or an assertion about nested
contexts; and the context that ends first switches it off, or on, for the other. Torch says that it
is not made for several threads.

So one thread at a time has it: a context that begins while another thread is inside one waits for
that to end, 120 s at most, and raises then. Nothing else waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from torchcompat.patch import Patch, Wrap
from torchcompat.sign import Sign

_WAIT_S: Final = 120.0


def _enable(original: Any) -> Any:
    lock = threading.RLock()

    @contextlib.contextmanager
    def _enable(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not lock.acquire(timeout=_WAIT_S):
            raise RuntimeError(
                f"compiled autograd has been in use by another thread for {_WAIT_S:.0f} s, and one "
                "thread at a time can have it. Leave it off in all threads but one "
                "(torchcompat, compiled_autograd)"
            )
        try:
            with original(*args, **kwargs):
                yield
        finally:
            lock.release()

    return _enable


PATCH = Patch(
    id="compiled_autograd",
    title="Threads that use compiled autograd must take turns",
    why=(
        "Two threads with compiled autograd raise 'Trying to run compiled autograd within another "
        "compiled autograd call' or 'requires no threads in backwards()', and one's end switches "
        "it off for the other."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target="torch._dynamo.compiled_autograd:_enable",
            factory=_enable,
            anchors=("set_autograd_compiler(",),
        ),
    ),
    signs=(
        Sign(text=r"compiled_autograd\._enable\(\) requires no threads in backwards\(\)"),
        Sign(
            text="Nested Compiled Autograd Contexts must return before their parent context",
            in_thread=True,
        ),
        Sign(
            text="Trying to run compiled autograd within another compiled autograd call",
            in_thread=True,
            sure=False,  # a backward inside a backward of one thread says the same
        ),
    ),
    repro="repro/compiled_autograd.py",
    links=("https://github.com/pytorch/pytorch/issues/152219",),
)
