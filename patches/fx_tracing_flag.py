"""fx_tracing_flag: "this thread is tracing with FX" is one bool for the whole process.

While one thread is inside `torch.fx.Tracer.trace` (every `make_fx`, `symbolic_trace`, AOTAutograd
graph, lazy backward compile) `torch.fx._symbolic_trace._is_fx_tracing_flag` is True, and a compiled
function called by any *other* thread refuses to run. Two traces that overlap restore the flag out
of order, and it stays True for good.

The flag becomes thread-local where it stands: `Tracer.trace`, `is_fx_tracing` and
`is_fx_symbolic_tracing` keep their identity and get new code, so a compiled function made before
`apply()`, which holds the check in its closure, is cured too; writers in other modules
(`torch._higher_order_ops.utils._set_compilation_env`) go through the module's property.
A trace over a compiled function in the *same* thread still raises torch's own error.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign

PATCH = Patch(
    id="fx_tracing_flag",
    title="FX tracing in one thread must not stop compiled calls in another",
    why=(
        "A compiled function raises 'Detected that you are using FX to symbolically trace a "
        "dynamo-optimized function' although its own thread traces nothing: another thread does. "
        "When two traces overlap, the flag stays set and every compiled call of the process raises "
        "from then on."
    ),
    affects=">=2.6.0.dev0,<2.14.0.dev0",
    fixed_in="2.14",
    edits=(
        ThreadLocal(
            module="torch.fx._symbolic_trace",
            name="_is_fx_tracing_flag",
            default=False,
            fixed_by=("_get_is_fx_tracing", "_is_fx_tracing_tls"),
        ),
    ),
    repro="repro/fx_tracing_flag.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/126024",
        "https://github.com/pytorch/pytorch/issues/168042",
        "https://github.com/pytorch/pytorch/pull/168999",
    ),
    signs=(
        Sign(
            text="Detected that you are using FX to symbolically trace a dynamo-optimized function",
            # torch is right to refuse where the thread itself is tracing
            absent=(
                "torch/fx/_symbolic_trace.py:trace",
                "torch/fx/experimental/proxy_tensor.py:trace|dispatch_trace|wrapped",
            ),
        ),
    ),
)
