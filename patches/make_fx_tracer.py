"""make_fx_tracer: "the make_fx that is tracing" is one global for the whole process.

A higher-order operator (`cond`, `while_loop`, `scan`, flex_attention, …) that is met while
`make_fx` or AOTAutograd traces asks `torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER`
for the tracer of its subgraphs. Each trace saves and restores the variable; a second thread's trace
that ends meanwhile leaves None there, or its own tracer, and the first one fails with "Cannot
reenter make_fx when we're not under a make_fx tracing session" or has its subgraph traced by a
stranger. Every torch to date.

The variable becomes thread-local in place. `torch._higher_order_ops.utils` imports it by name at
each call, which reads the module's property.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign

PATCH = Patch(
    id="make_fx_tracer",
    title="A higher-order operator must find the make_fx of its own thread",
    why=(
        "While two threads trace, cond, scan, flex_attention and other operators with subgraphs "
        "raise 'Cannot reenter make_fx when we're not under a make_fx tracing session', or put "
        "their subgraph into the other thread's trace."
    ),
    affects=">=2.6.0.dev0",
    requires=("fx_patcher",),  # overlapping traces fail on that first
    edits=(
        ThreadLocal(module="torch.fx.experimental.proxy_tensor", name="_CURRENT_MAKE_FX_TRACER"),
    ),
    repro="repro/make_fx_tracer.py",
    signs=(Sign(text="Cannot reenter make_fx when we're not under a make_fx tracing session"),),
)
