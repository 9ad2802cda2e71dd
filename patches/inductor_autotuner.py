"""inductor_autotuner: a kernel of Inductor's that is measured by one thread is unloaded by another.

The first call of a kernel with several configurations measures them and keeps the best one. Nothing
keeps a second thread's first call out: both measure at once, which spoils the measurement. From
2.13 on whoever measures also unloads the configurations that lose: the other thread then calls
what is unloaded (a bare `AssertionError` at `self.function is not None`), and if it comes to
another winner it unloads the one that the first thread is about to launch.

`CachingAutotuner.autotune_to_one_config` takes a lock of the kernel's own, and whoever had to wait
uses what was chosen. Calls of kernels that are chosen do not come there.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

from torchcompat.patch import Patch, Wrap
from torchcompat.sign import Sign

_HEURISTICS: Final = "torch._inductor.runtime.triton_heuristics"
_making = threading.Lock()
#: Not on the kernels themselves: those are pickled.
_locks: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def _lock_of(kernel: Any) -> Any:
    with _making:
        return _locks.setdefault(kernel, threading.RLock())


def _autotune(original: Any) -> Any:
    def autotune_to_one_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock_of(self):
            if len(self.launchers) == 1:
                return None
            return original(self, *args, **kwargs)

    return autotune_to_one_config


PATCH = Patch(
    id="inductor_autotuner",
    title="Threads that first call one of Inductor's kernels together must measure it once",
    why=(
        "Two threads' first calls of a Triton kernel that Inductor made measure its configurations "
        "at the same time: measurements are spoilt, and from torch 2.13 on each unloads "
        "configurations that the other one calls, which raises a bare AssertionError."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target=f"{_HEURISTICS}:CachingAutotuner.autotune_to_one_config",
            factory=_autotune,
            signature=("self", "args", "kwargs"),
            anchors=("self.benchmark_all_configs(*args, **kwargs)", "self.launchers = ["),
        ),
    ),
    repro="repro/inductor_autotuner.py",
    signs=(
        Sign(
            text=r"^AssertionError",
            raised_in="torch/_inductor/runtime/static_triton_launcher.py:run",
        ),
    ),
)
