"""pre_dispatch_modes: the modes of a trace before dispatch are one stack for all threads.

`make_fx(pre_dispatch=True)`, with which `torch.export.export` traces, keeps its proxy and
functional modes in an object of `torch._ops` that all threads share; the dispatch key that leads to
it is per thread. `get_proxy_mode` and its like look there first, in whatever thread: a compile of
another thread meets the export's tracer ("is not tracked with proxy for"), and traces that overlap
take each other's modes off the stack ("Trying to pop empty mode stack", "Expected
ProxyTorchDispatchMode"). Every torch to date.

The object becomes one for each thread. `mode_stack_state_for_pre_dispatch` is the way to it.
"""

from __future__ import annotations

import sys
from typing import Final

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign

_MODULE: Final = "torch._ops"


def _empty_stack() -> object:
    return sys.modules[_MODULE]._ModeStackStateForPreDispatch()


PATCH = Patch(
    id="pre_dispatch_modes",
    title="The modes of an export's trace must not reach other threads",
    why=(
        "While one thread exports, or traces with pre_dispatch=True, compiles and traces of other "
        "threads take its tracer for theirs: 'is not tracked with proxy for', 'Trying to pop empty "
        "mode stack', 'Expected ProxyTorchDispatchMode, got NoneType'."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocal(module=_MODULE, name="_mode_stack_state_for_pre_dispatch", fresh=_empty_stack),
    ),
    repro="repro/pre_dispatch_modes.py",
    signs=(
        Sign(text=r"^AssertionError: Trying to pop empty mode stack", in_thread=True),
        Sign(
            text=r"^AssertionError: (?:Expected ProxyTorchDispatchMode, got|$)",
            raised_in="torch/fx/experimental/proxy_tensor.py:wrapped",
            in_thread=True,
            sure=False,
        ),
        Sign(
            text=r"is not tracked with proxy for <torch\.fx\.experimental\.proxy_tensor\.",
            in_thread=True,
            sure=False,
        ),
    ),
)
