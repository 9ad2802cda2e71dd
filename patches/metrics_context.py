"""metrics_context: the metrics of all compiles go into one context for the process.

Dynamo collects figures on a compile (times, counts, reasons) in `torch._dynamo.utils.
_METRICS_CONTEXT`, which is entered around each compile, forward or lazy backward, and refuses a
figure that is set twice or outside of a compile. A forward's compile in one thread and a backward's
in another, or an export's, share it: the one that begins second finds the other's figures
(`RuntimeError: Metric(s) {…} have already been set in the current context`), or has its own taken
away by the other's end (`Cannot update metrics outside of a MetricsContext`). The figures that are
gathered while compiled code runs (`_RUNTIME_METRICS_CONTEXT`, from 2.7 on) mix alike.

torch 2.11 keeps both in a `threading.local`. Here the two globals become thread-local in place.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal, ThreadLocals
from torchcompat.sign import Sign

_UTILS: Final = "torch._dynamo.utils"
_FIXED: Final = ("_metrics_context_tls",)


def _compile_metrics() -> Any:
    utils: Any = sys.modules[_UTILS]
    return utils.MetricsContext(on_exit=utils.record_compilation_metrics)


def _runtime_metrics() -> Any:
    utils: Any = sys.modules[_UTILS]
    return utils.RuntimeMetricsContext(on_exit=utils.record_compilation_metrics)


PATCH = Patch(
    id="metrics_context",
    title="Dynamo's figures on one compile must not mix with those of another thread's",
    why=(
        "Up to torch 2.10 a compile of a backward, an export or a raw compile_fx in one thread "
        "while another thread compiles raises RuntimeError: Metric(s) {…} have already been set in "
        "the current context, or Cannot update metrics outside of a MetricsContext."
    ),
    affects=">=2.6.0.dev0,<2.11.0.dev0",
    fixed_in="2.11",
    edits=(
        ThreadLocals(
            variables=(
                ThreadLocal(
                    module=_UTILS,
                    name="_METRICS_CONTEXT",
                    fresh=_compile_metrics,
                    fixed_by=_FIXED,
                ),
                ThreadLocal(
                    module=_UTILS,
                    name="_RUNTIME_METRICS_CONTEXT",
                    fresh=_runtime_metrics,
                    fixed_by=_FIXED,
                    optional=True,  # 2.6 has none
                ),
            )
        ),
    ),
    repro="repro/metrics_context.py",
    links=("https://github.com/pytorch/pytorch/pull/170605",),
    signs=(
        Sign(
            text=r"Metric\(s\) \{.*\} have already been set in the current context",
            frames=("torch/_dynamo/metrics_context.py:*",),
        ),
        Sign(
            text=r"Metric '\w+' has already been set in the current context",
            frames=("torch/_dynamo/metrics_context.py:*",),
        ),
        Sign(
            text=r"Cannot (?:increment|set|update|add) \w+ outside of a MetricsContext",
            raised_in="torch/_dynamo/metrics_context.py:*",
        ),
    ),
)
