"""triton_autotuner: the arguments of a call to an autotuned kernel are an attribute of the kernel.

`triton.runtime.autotuner.Autotuner.run` puts the arguments of the call at hand into `self.nargs`,
reads them while it chooses and benchmarks configurations, and sets them to None at the end. Of two
threads that call one kernel, the first to end takes the other's away: `TypeError: 'NoneType' object
is not a mapping`, or the choice is made for another call's sizes. Every Triton to date.

The attribute becomes a property over storage that is the thread's and the kernel's own.
"""

from __future__ import annotations

import threading
from typing import Any

from torchcompat.patch import Patch, Value
from torchcompat.sign import Sign

_STORE = "_torchcompat_nargs"


class PerThread:
    """A data descriptor: each thread's own value on each object."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return vars(instance)[_STORE].value
        except (KeyError, AttributeError):
            raise AttributeError("nargs: no call of this kernel is under way") from None

    def __set__(self, instance: Any, value: Any) -> None:
        # setdefault is atomic: two threads' first calls get one storage.
        vars(instance).setdefault(_STORE, threading.local()).value = value


PATCH = Patch(
    id="triton_autotuner",
    title="Threads that call one autotuned Triton kernel must keep their own arguments",
    why=(
        "Two threads that call one @triton.autotune kernel share the arguments of the call: one "
        "raises TypeError: 'NoneType' object is not a mapping, or configurations are chosen for "
        "the other's sizes."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Value(
            target="triton.runtime.autotuner:Autotuner.nargs",
            factory=lambda _: PerThread(),
            create=True,
        ),
    ),
    repro="repro/triton_autotuner.py",
    links=("https://github.com/triton-lang/triton/pull/11494",),
    signs=(
        Sign(
            text=r"^TypeError: 'NoneType' object is not a mapping",
            raised_in="triton/runtime/autotuner.py:*",
        ),
    ),
)
