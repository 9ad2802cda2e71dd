"""first_import: two threads that first import the compiler's modules break them for good.

Dynamo, Inductor, AOTAutograd and export import each other in circles, and only when they are first
used. One thread gets through such a circle; two that enter it at different places wait for each
other's module locks, which the import system ends with `_DeadlockError` or with modules that are
half there, and every later compile of the process raises ImportError.

A thread takes the lock of `torch._dynamo.utils` before that of `torch._dynamo`, whose body imports
it again: no hook of the import system is early enough, and a lock of ours around the modules would
wait under theirs. So the import system's own locks are made fewer: torch's modules have one between
them. It is reentrant, so a circle goes as in one thread, and Python still finds its deadlocks.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any, Final

from torchcompat.install import AttrSlot, Slot, finish_wrapper, patch_being_built
from torchcompat.patch import Edit, Patch
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

# There is no public way to an import's locks. Python 3.10 to 3.13 have these alike.
_BOOTSTRAP: Final[Any] = importlib._bootstrap
_GET: Final = "_get_module_lock"
_USED: Final = (_GET, "_ModuleLock", "_module_locks")


class _Locks:
    """Stands for the import system's look-up of a module's lock."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._shared = _BOOTSTRAP._ModuleLock("torch")
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Only the thread that forked is in the child; the lock may be another's."""
        if self._shared.owner is not None:
            self._shared = _BOOTSTRAP._ModuleLock("torch")

    def get(self, name: str) -> Any:
        """The lock of the module `name`."""
        if not name.startswith("torch.") and name != "torch":
            return self._original(name)
        reference = _BOOTSTRAP._module_locks.get(name)
        before = None if reference is None else reference()
        # An import that began before us has the module's own lock until it ends.
        return self._shared if before is None or before.owner is None else before


@dataclass(frozen=True, eq=False)
class _OneLockForTorch(Edit):
    @property
    def modules(self) -> tuple[str, ...]:
        return ("torch",)

    def inspect(self) -> Finding:
        if "_dynamo" not in vars(sys.modules["torch"]).get("_lazy_modules", ()):
            return Finding("fixed", "torch does not import its compiler on first use")
        for name in _USED:
            if not hasattr(_BOOTSTRAP, name):
                return Finding("drifted", f"this Python's import system has no {name}")
        return Finding("ok", "the compiler's modules are imported by whoever uses them first")

    def build(self) -> list[Slot]:
        original = getattr(_BOOTSTRAP, _GET)
        new = finish_wrapper(_Locks(original).get, original, patch_being_built())
        return [AttrSlot(_BOOTSTRAP, _GET, new)]


# What torch imports only when the compiler is first used.
_LAZY: Final = r"torch\.(?:_dynamo|_inductor|_functorch|_export|fx|compiler)"

PATCH = Patch(
    id="first_import",
    title="The compiler's modules must be imported by one thread at a time",
    why=(
        "Two threads that first use torch.compile, torch._dynamo or torch.export together end in "
        "_DeadlockError and half imported modules, and every later compile raises ImportError."
    ),
    affects=">=2.6.0.dev0",
    edits=(_OneLockForTorch(),),
    repro="repro/first_import.py",
    links=("https://github.com/pytorch/pytorch/issues/182560",),
    signs=(
        Sign(text=rf"partially initialized module '{_LAZY}[\w.]*'", in_thread=True),
        Sign(text=rf"partially initialized module '{_LAZY}[\w.]*'", sure=False),
        Sign(text=rf"deadlock detected by _ModuleLock\('{_LAZY}[\w.]*'\)"),
        Sign(
            text=r"No module named 'torch\._C[\w.]*'; 'torch\._C' is not a package",
            in_thread=True,
            sure=False,  # a broken installation says the same
        ),
    ),
)
