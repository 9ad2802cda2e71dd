"""error_on_graph_break: "a graph break is an error now" is one bool for the whole process.

`torch.compile(fullgraph=True)` and `torch._dynamo.error_on_graph_break(True)` set
`torch._dynamo.utils._error_on_graph_break` around every call of theirs. While one thread is inside
such a call, another thread's ordinary compile that meets a graph break raises `Unsupported` instead
of breaking; and two calls that overlap leave the wrong value behind. torch 2.9 and later.

The variable becomes thread-local in place; its readers and writers keep their identity, by which
Dynamo knows them.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign

PATCH = Patch(
    id="error_on_graph_break",
    title="fullgraph in one thread must not forbid graph breaks in another",
    why=(
        "While one thread is inside a call compiled with fullgraph=True, or inside "
        "error_on_graph_break(True), another thread's compile that meets a graph break raises "
        "torch._dynamo.exc.Unsupported although it may break. Overlapping calls leave the setting "
        "wrong for good."
    ),
    affects=">=2.9.0.dev0",
    edits=(ThreadLocal(module="torch._dynamo.utils", name="_error_on_graph_break", default=False),),
    repro="repro/error_on_graph_break.py",
    signs=(
        Sign(
            text=r"Unsupported: Call to `torch\._dynamo\.graph_break\(\)`",
            in_thread=True,
            frames=("torch/_dynamo/eval_frame.py:compile_wrapper|_fn",),
            sure=False,  # a fullgraph call of this thread says the same
        ),
    ),
)
