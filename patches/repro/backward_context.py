"""Two compiled backwards of one backward(): the second begins while the first is under way.

The engine does so with a thread per device. Here there is one device, so a thread of the program
takes the part of the second device's: it gets what the engine hands on, and runs the other node.
"""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch._dynamo.backends.common import aot_autograd

harness.warm_up()
harness.apply_patches("backward_context")
C: Any = torch._C
others: list[harness.Worker] = []


def as_it_is(gm: Any, example_inputs: Any) -> Any:
    return gm


def as_on_another_device(context: Any, node: Any) -> Any:
    C._stash_obj_in_tls("context", context)
    try:
        return node.apply(torch.ones(3))
    finally:
        C._stash_obj_in_tls("context", None)


def meets_another(gm: Any, example_inputs: Any) -> Any:
    def backward(*args: Any) -> Any:
        if not C._is_key_in_tls("context") or C._get_obj_in_tls("context") is None:
            harness.not_applicable("no context is handed on in this torch")
        context = C._get_obj_in_tls("context")
        others.append(harness.Worker(lambda: as_on_another_device(context, second.grad_fn)))
        others[0].finish()
        return gm(*args)

    return backward


x = torch.ones(3, requires_grad=True)
plain = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)
second = torch.compile(lambda y: y.cos(), backend=plain)(x)
meets = aot_autograd(fw_compiler=as_it_is, bw_compiler=meets_another)
first = torch.compile(lambda y: y.sin(), backend=meets)(x)
first.sum().backward()
faults: list[str] = []
if others[0].error is not None:
    faults.append(f"the second backward: {harness.first_line(others[0].error)}")
else:
    result = others[0].result
    gradient = result[0] if isinstance(result, tuple) else result
    if not torch.allclose(gradient, -torch.ones(3).sin()):
        faults.append(f"the second backward is wrong: {gradient}")
if x.grad is None or not torch.allclose(x.grad, torch.ones(3).cos()):
    faults.append(f"the first backward is wrong: {x.grad}")
harness.verdict(faults)
