"""dispatch_mode_flags: "a torch dispatch mode is active" is a bool of the whole process.

Every `TorchDispatchMode` saves, sets and restores globals of `torch.utils._python_dispatch`, where
modes themselves are per thread. While one thread is inside a mode, all threads seem to be: up to
torch 2.10 Dynamo then skips another thread's first call of a compiled function, which stays eager
for good, silently. Two modes that overlap in two threads leave the flags True for ever.

The flags become thread-local; the functions that read them keep their identity.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal, ThreadLocals

_MODULE = "torch.utils._python_dispatch"

PATCH = Patch(
    id="dispatch_mode_flags",
    title="A dispatch mode in one thread must not seem active in all",
    why=(
        "While one thread is inside a TorchDispatchMode, torch takes every thread to be: up to "
        "2.10 a compiled function whose first call falls into it stays eager for good, silently. "
        "Modes that overlap in two threads leave the flags set for ever."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocals(
            variables=(
                ThreadLocal(module=_MODULE, name="_is_in_torch_dispatch_mode", default=False),
                ThreadLocal(
                    module=_MODULE, name="_is_in_non_infra_torch_dispatch_mode", default=False
                ),
                ThreadLocal(
                    module=_MODULE,
                    name="_is_in_any_mode_without_ignore_compile_internals",
                    default=False,
                    optional=True,
                ),
            )
        ),
    ),
    repro="repro/dispatch_mode_flags.py",
    links=("https://github.com/pytorch/pytorch/pull/186085",),
)
