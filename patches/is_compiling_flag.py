"""is_compiling_flag: "torch is compiling" is said to every thread, not only to the one that does.

`torch.compiler.is_compiling()`, which libraries ask before they take a path meant for tracing,
reads a module global. From 2.13 on it is set for the length of every compile, and in every version
for the length of an export; the flag of non-strict tracing is of the same kind (that of
`is_exporting()` too: patch export_threads).
An eager thread beside it is told that it is being traced: silently another path, with checks and
warnings left out. Two exports that overlap leave the flags set.

The flags become thread-local in place. `is_compiling` and its like keep their identity, which
Dynamo replaces by constants; the writers in `torch._export.utils` go through the module's
properties.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal

_MODULE = "torch.compiler"

PATCH = Patch(
    id="is_compiling_flag",
    title="torch.compiler.is_compiling() must be about the thread that asks",
    why=(
        "While one thread compiles (2.13 on) or exports (every version), torch.compiler."
        "is_compiling() is True in eager threads too, so that libraries silently take the path "
        "meant for tracing. Overlapping exports leave it True for good."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocal(module=_MODULE, name="_is_compiling_flag", default=False),
        ThreadLocal(
            module=_MODULE, name="_is_non_strict_tracing_flag", default=False, optional=True
        ),
    ),
    repro="repro/is_compiling_flag.py",
)
