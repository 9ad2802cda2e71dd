"""Make torch.compile and its surroundings safe for threads: patches that know when they are needed.

    import torchcompat
    print(torchcompat.apply())

Importing this package imports no torch, and neither does `apply()`. The names below are loaded when
they are first used: a program that only switches us off, or imports torch with the automatic door
shut, loads nothing else of this package.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not from typing: this module loads nothing that Python has not loaded
if TYPE_CHECKING:
    from typing import Any

    from torchcompat.api import applied, apply, explain, original, plan, status, unapply
    from torchcompat.build import TorchBuild
    from torchcompat.choice import FirstOf
    from torchcompat.errors import (
        ConfigError,
        PatchConflict,
        PatchError,
        PatchNotApplied,
        PluginError,
        RecompileLimitWarning,
        SourceDrift,
        TargetNotFound,
        TorchCompatError,
        TorchCompatWarning,
        WarmupError,
    )
    from torchcompat.patch import Code, Edit, Patch, Replace, Value, Wrap
    from torchcompat.report import Report
    from torchcompat.rewrite import ThreadLocal, ThreadLocals
    from torchcompat.sign import Hazard, Sign
    from torchcompat.target import MISSING
    from torchcompat.thread_view import threads, threads_every, threads_on_signal
    from torchcompat.verdict import Finding, State, Verdict
    from torchcompat.warming import WarmupItem, WarmupReport, warmup

__all__ = [
    "MISSING",
    "Code",
    "ConfigError",
    "Edit",
    "Finding",
    "FirstOf",
    "Hazard",
    "Patch",
    "PatchConflict",
    "PatchError",
    "PatchNotApplied",
    "PluginError",
    "RecompileLimitWarning",
    "Replace",
    "Report",
    "Sign",
    "SourceDrift",
    "State",
    "TargetNotFound",
    "ThreadLocal",
    "ThreadLocals",
    "TorchBuild",
    "TorchCompatError",
    "TorchCompatWarning",
    "Value",
    "Verdict",
    "WarmupError",
    "WarmupItem",
    "WarmupReport",
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
    "warmup",
]

# Which module of this package has each of the names.
_HOMES = {
    "api": ("applied", "apply", "explain", "original", "plan", "status", "unapply"),
    "build": ("TorchBuild",),
    "choice": ("FirstOf",),
    "errors": (
        "ConfigError",
        "PatchConflict",
        "PatchError",
        "PatchNotApplied",
        "PluginError",
        "RecompileLimitWarning",
        "SourceDrift",
        "TargetNotFound",
        "TorchCompatError",
        "TorchCompatWarning",
        "WarmupError",
    ),
    "patch": ("Code", "Edit", "Patch", "Replace", "Value", "Wrap"),
    "report": ("Report",),
    "rewrite": ("ThreadLocal", "ThreadLocals"),
    "sign": ("Hazard", "Sign"),
    "target": ("MISSING",),
    "thread_view": ("threads", "threads_every", "threads_on_signal"),
    "verdict": ("Finding", "State", "Verdict"),
    "warming": ("WarmupItem", "WarmupReport", "warmup"),
}


def _publish(home: str) -> None:
    """Take over the names of a module that is loaded to its end. Tracebacks and pickles show them
    as people import them."""
    module = sys.modules.get(f"{__name__}.{home}")
    if not all(hasattr(module, name) for name in _HOMES[home]):
        return
    for name in _HOMES[home]:
        value = getattr(module, name)
        if hasattr(value, "__qualname__"):
            value.__module__ = __name__
        globals()[name] = value


if not TYPE_CHECKING:  # a checker would take it to mean that every name exists

    def __getattr__(name: str) -> Any:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{home}"), name)
        for other in _HOMES:  # what `apply` raises is to show its public name as well
            _publish(other)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
