"""fx_traceback_meta: what a thread says about the nodes it traces is written on others' nodes too.

`torch.fx.traceback` keeps the metadata for new FX nodes (annotations, stack traces, sequence
numbers, checkpointing and regional-compile tags) and whether to keep any in module globals. An
`annotate()` block, an activation checkpoint or a pass in one thread marks the nodes that another
thread is tracing, which the partitioner and Inductor act on: silently another graph. Every torch to
date (thread-local upstream in pytorch#184917, open).

The four globals become thread-local in place. AOTAutograd traces a backward in the calling thread,
so no engine thread has to see the settings of another one.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal, ThreadLocals
from torchcompat.sign import Sign

_MODULE = "torch.fx.traceback"

PATCH = Patch(
    id="fx_traceback_meta",
    title="Annotations of FX nodes must stay with the thread that traces",
    why=(
        "torch.fx.traceback.annotate(), checkpointing and compiler passes in one thread tag the "
        "nodes that another thread is tracing: its partitioning and regional compilation change "
        "silently, and overlapping blocks leave tags behind."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocals(
            variables=(
                ThreadLocal(module=_MODULE, name="current_meta", fresh=dict),
                ThreadLocal(module=_MODULE, name="should_preserve_node_meta", default=False),
                ThreadLocal(
                    module=_MODULE, name="_should_preserve_node_meta", default=False, optional=True
                ),
                ThreadLocal(module=_MODULE, name="current_replay_node", optional=True),
            )
        ),
    ),
    repro="repro/fx_traceback_meta.py",
    links=("https://github.com/pytorch/pytorch/pull/184917",),
    signs=(
        Sign(  # the block's end finds another thread's metadata
            text=r"^KeyError: 'custom'",
            raised_in="torch/fx/traceback.py:annotate",
        ),
    ),
)
