"""Make torch.compile and its surroundings safe for threads: patches that know when they are needed.

    import torchcompat
    print(torchcompat.apply())

Importing this package imports no torch, and neither does `apply()`.
"""

from __future__ import annotations

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
from torchcompat.sign import Hazard, Sign
from torchcompat.target import MISSING
from torchcompat.verdict import Finding, State, Verdict

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
    "Value",
    "Verdict",
    "Wrap",
    "applied",
    "apply",
    "explain",
    "original",
    "plan",
    "status",
    "unapply",
]

# Tracebacks and pickles show the name that people import.
for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):
        globals()[_name].__module__ = __name__
del _name
