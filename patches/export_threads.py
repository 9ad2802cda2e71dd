"""export_threads: "this thread exports" is one bool for the whole process.

While `torch.export` runs in one thread `torch.compiler._is_exporting_flag` is True, and
`torch.compiler.is_exporting()` with it, in every thread. From 2.10 `torch.compile(model)` in
another thread then returns the model as it is, which stays eager for good, with a warning;
libraries and modules of torch (`nn.MultiheadAttention`) take the branch that is meant for exports.
Two exports that overlap restore the flag out of order, and it stays True.

`torch.export._trace` keeps what an export notes while it runs, the hierarchy of its module, in two
globals. An export that ends takes them from one that is under way, which raises
"_EXPORT_MODULE_HIERARCHY must not be None", or signs its program with the other module's names.

All three become thread-local. `is_exporting` keeps its identity, by which Dynamo knows it; the
writer in `torch._export.utils` and readers elsewhere go through the module's property.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal, ThreadLocals
from torchcompat.sign import Sign

PATCH = Patch(
    id="export_threads",
    title="An export in one thread must not change torch.compile in another",
    why=(
        "While one thread is inside torch.export, torch.compiler.is_exporting() is True in all: "
        "torch.compile(model) in another thread warns and returns the model, which then runs "
        "eager for good, and code that asks takes the branch for exports. After two overlapping "
        "exports it stays so. Overlapping exports also lose each other's module hierarchy: "
        "'_EXPORT_MODULE_HIERARCHY must not be None'."
    ),
    affects=">=2.7.0.dev0",
    edits=(
        ThreadLocal(module="torch.compiler", name="_is_exporting_flag", default=False),
        ThreadLocals(
            variables=(
                ThreadLocal(module="torch.export._trace", name="_EXPORT_FLAGS"),
                ThreadLocal(module="torch.export._trace", name="_EXPORT_MODULE_HIERARCHY"),
            )
        ),
    ),
    repro="repro/export_threads.py",
    links=("https://github.com/pytorch/pytorch/issues/168042",),
    signs=(
        Sign(text="_EXPORT_MODULE_HIERARCHY must not be None"),
        Sign(
            text="torch.compile is ignored when called inside torch.export region",
            kind="log",
            sure=False,  # an export's own code may call torch.compile
        ),
        Sign(
            text="You are calling torch.compile inside torch.export region",
            kind="log",
            sure=False,
        ),
    ),
)
