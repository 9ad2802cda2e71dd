"""forward_from_src: a GraphModule made while another thread compiles is never compiled.

During a compile Dynamo sets `torch.fx.graph_module._forward_from_src` to a function that marks the
`forward` it makes as code to skip, lest it compile what it has just generated. The name is the
process's: a GraphModule that another thread makes or recompiles meanwhile (`fx.symbolic_trace`,
`make_fx`, a quantiser, a loaded export) is marked, too. `torch.compile` of it runs eagerly for
ever, silently, or fails with `fullgraph=True`.

The global becomes thread-local in place, starting from torch's own function in every thread.
"""

from __future__ import annotations

import inspect
from typing import Any

from torchcompat.install import AttrSlot, Slot
from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal, thread_value
from torchcompat.target import MISSING


def _own(current: Any) -> Any:
    """Each thread's, starting from the function behind the one that a compile under way has set."""
    return thread_value(staticmethod(inspect.unwrap(current)))


class _Maker(ThreadLocal):
    """The global, of which torch's own function is left where the patch is taken away."""

    def build(self) -> list[Slot]:
        slots = super().build()
        for slot in slots:
            if isinstance(slot, AttrSlot):
                slot.new = inspect.unwrap(slot.new)
                slot.before = MISSING  # Dynamo's own name for it is meant to stay: no stale alias
        return slots


PATCH = Patch(
    id="forward_from_src",
    title="A GraphModule made while another thread compiles must stay one that can be compiled",
    why=(
        "A GraphModule that a thread makes while another compiles is marked as code to skip: "
        "torch.compile of it runs eagerly for ever, silently, or raises with fullgraph=True."
    ),
    affects=">=2.6.0.dev0",
    edits=(_Maker(module="torch.fx.graph_module", name="_forward_from_src", holder=_own),),
    repro="repro/forward_from_src.py",
)
