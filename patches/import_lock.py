"""import_lock: a compile waits for an import that waits for the compile.

While Dynamo traces, with its compile lock held, it imports the module that a global of the traced
function belongs to. If another thread is still inside that module's import, the compile waits for
it by the import system's lock of that module. Does the module's body call compiled code, that waits
for the compile lock: neither ends, in every torch to date, without a message.

The function that is traced exists, so its module's namespace exists: where a thread that holds the
compile lock asks for a module that another thread is still importing, it gets the module as it is.
That is also what the function would see if it ran uncompiled.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

from torchcompat.patch import Patch, Value
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_USERS: Final = ("torch._dynamo.symbolic_convert", "torch._dynamo.guards")


def _compiles() -> bool:
    """Whether the current thread has the compile lock."""
    # Not looked up when judging: convert_frame defines it after it has imported the two users.
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    return lock is not None and bool(lock._is_owned())


class _Importlib(ModuleType):
    """importlib for Dynamo's tracing: everything is importlib's own but `import_module`."""

    def __init__(self, original: ModuleType) -> None:
        super().__init__(original.__name__, original.__doc__)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """The module `name`; half imported, where waiting for the rest could be for ever."""
        module = sys.modules.get(name)
        if module is not None and package is None:
            spec = getattr(module, "__spec__", None)
            if getattr(spec, "_initializing", False) and _compiles():
                return module
        imported: ModuleType = self._original.import_module(name, package)
        return imported


def _recognise() -> Finding:
    for name in _USERS:
        if vars(sys.modules[name]).get("importlib") is not importlib:
            return Finding("drifted", f"{name} imports modules in another way")
    return Finding("ok", "a compile waits for imports of other threads")


PATCH = Patch(
    id="import_lock",
    title="A compile must not wait for an import that waits for the compile",
    why=(
        "Tracing a function whose module is still being imported by another thread waits for the "
        "import, with the compile lock held; if the module's body calls compiled code, both wait "
        "for ever, silently."
    ),
    affects=">=2.6.0.dev0",
    recognise=_recognise,
    edits=tuple(Value(target=f"{name}:importlib", factory=_Importlib) for name in _USERS),
    repro="repro/import_lock.py",
    links=("https://github.com/pytorch/pytorch/issues/197046",),
    signs=(
        Sign(
            text="",
            kind="dump",
            frames=(
                "<frozen importlib._bootstrap>|importlib/_bootstrap.py:acquire",
                "torch/_dynamo/convert_frame.py:_compile",
            ),
            beside=("torch/_dynamo/convert_frame.py:__call__", "<frozen importlib._bootstrap>:*"),
        ),
    ),
)
