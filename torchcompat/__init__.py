"""Make torch.compile and its surroundings safe for threads: patches that know when they are needed.

    import torchcompat
    print(torchcompat.apply())

Importing this package imports no torch, and neither does `apply()`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchcompat.api import applied, apply, explain, original, plan, status, unapply
    from torchcompat.build import TorchBuild
    from torchcompat.choice import FirstOf
    from torchcompat.errors import (
        ConfigError,
        PatchConflict,
        PatchError,
        PatchNotApplied,
        PluginError,
        SourceDrift,
        TargetNotFound,
        TorchCompatError,
    )
    from torchcompat.patch import Code, Edit, Patch, Replace, Value, Wrap
    from torchcompat.report import Report
    from torchcompat.rewrite import ThreadLocal, ThreadLocals
    from torchcompat.target import MISSING
    from torchcompat.thread_view import threads, threads_every, threads_on_signal
    from torchcompat.verdict import Finding, State, Verdict

__all__ = [
    "MISSING",
    "Code",
    "ConfigError",
    "Edit",
    "Finding",
    "FirstOf",
    "Patch",
    "PatchConflict",
    "PatchError",
    "PatchNotApplied",
    "PluginError",
    "Replace",
    "Report",
    "SourceDrift",
    "State",
    "TargetNotFound",
    "ThreadLocal",
    "ThreadLocals",
    "TorchBuild",
    "TorchCompatError",
    "Value",
    "Verdict",
    "Wrap",
    "applied",
    "apply",
    "explain",
    "original",
    "plan",
    "status",
    "threads",
    "threads_every",
    "threads_on_signal",
    "unapply",
]

# Read when first asked for: pytest imports this package in every run for the sake of its plugin.
_HOME = {
    "api": (
        "applied",
        "apply",
        "explain",
        "original",
        "plan",
        "status",
        "unapply",
    ),
    "build": ("TorchBuild",),
    "choice": ("FirstOf",),
    "errors": (
        "ConfigError",
        "PatchConflict",
        "PatchError",
        "PatchNotApplied",
        "PluginError",
        "SourceDrift",
        "TargetNotFound",
        "TorchCompatError",
    ),
    "patch": (
        "Code",
        "Edit",
        "Patch",
        "Replace",
        "Value",
        "Wrap",
    ),
    "report": ("Report",),
    "rewrite": (
        "ThreadLocal",
        "ThreadLocals",
    ),
    "target": ("MISSING",),
    "thread_view": (
        "threads",
        "threads_every",
        "threads_on_signal",
    ),
    "verdict": (
        "Finding",
        "State",
        "Verdict",
    ),
}


def __getattr__(name: str) -> Any:
    """The first public name that is asked for brings all of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, names in _HOME.items():
        source = importlib.import_module(f"{__name__}.{module}")
        for public in names:
            value = getattr(source, public)
            if hasattr(value, "__qualname__"):
                value.__module__ = __name__  # tracebacks and pickles show what people import
            globals()[public] = value
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
