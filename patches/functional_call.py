"""functional_call: threads that call one module with weights of their own take each other's.

`torch.func.functional_call(module, weights, ...)` puts the weights into the module for the time of
the call and the module's own back afterwards. Two threads that do so with one module (ensembles,
fast weights of a task per thread) compute with each other's weights, silently, and the last one to
end may leave its weights in the module for good. A fault of eager torch.

The calls of one module wait for each other: one lock for each module, taken for the time that its
weights are out. A call that waits for 60 s raises instead of waiting for ever: a forward that waits
for another thread's call of the same module cannot be served.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Final

from torchcompat.patch import Patch, Wrap

_WAIT_S: Final = 60.0


class _Locks:
    """One reentrant lock for each module that is called so, for as long as the module lives."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of(self, module: Any) -> Any:
        with self._guard:
            lock = self._locks.get(module)
            if lock is None:
                lock = self._locks[module] = threading.RLock()
            return lock


def _functional_call(original: Any) -> Any:
    locks = _Locks()
    torch: Any = sys.modules["torch"]

    def locked(module: Any, *args: Any, **kwargs: Any) -> Any:
        lock = locks.of(module)
        if not lock.acquire(timeout=_WAIT_S):
            raise RuntimeError(
                f"functional_call of {type(module).__name__} has waited {_WAIT_S:.0f} s for "
                "another thread's functional_call of the same module object, whose weights are in "
                "it meanwhile. Give each thread a copy of the module (torchcompat, functional_call)"
            )
        try:
            return original(module, *args, **kwargs)
        finally:
            lock.release()

    def _functional_call(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo knows the answer while it traces, so that it never meets the lock.
        if torch.compiler.is_dynamo_compiling():
            return original(module, *args, **kwargs)
        return locked(module, *args, **kwargs)

    return _functional_call


PATCH = Patch(
    id="functional_call",
    title="Threads that call one module functionally must compute with their own weights",
    why=(
        "Two threads inside torch.func.functional_call of one module object use each other's "
        "weights, silently, and the module may be left with weights that are not its own."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target="torch.nn.utils.stateless:_functional_call",
            factory=_functional_call,
            anchors=("_reparametrize_module(", "return module(*args, **kwargs)"),
        ),
    ),
    repro="repro/functional_call.py",
)
