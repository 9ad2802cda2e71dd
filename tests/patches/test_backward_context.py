from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd

import torchcompat

C: Any = torch._C
pytestmark = pytest.mark.skipif(
    not any(v.patch_id == "backward_context" and v.state.value == "ok" for v in torchcompat.plan()),
    reason="a backward hands on no context in this torch, or copies of it",
)


def compiled(function: Any, backward: Any) -> Any:
    backend = aot_autograd(fw_compiler=lambda gm, inputs: gm, bw_compiler=backward)
    return torch.compile(function, backend=backend)


def during_backward(look: Any) -> torch.Tensor:
    """`look()` runs inside of the compiled backward of sin; gives the gradient."""

    def backward(gm: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            look()
            return gm(*args)

        return run

    x = torch.ones(3, requires_grad=True)
    compiled(lambda y: y.sin().sum(), backward)(x).backward()
    assert x.grad is not None
    return x.grad


def test_what_is_handed_on_can_be_entered_twice_at_once(patched: None) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    both = threading.Barrier(2)
    seen: list[list[int]] = []

    def enter() -> int:
        both.wait(WAIT_S)
        return variable.get()

    def look() -> None:
        handed = C._get_obj_in_tls("context")
        workers = [Worker(lambda: handed.run(enter)) for _ in "ab"]
        seen.append([w.get() for w in workers])

    torch.testing.assert_close(during_backward(look), torch.ones(3).cos())
    assert seen == [[7, 7]]


def test_settings_of_the_caller_hold_in_a_compiled_backward(patched: None) -> None:
    seen: list[Any] = []
    with config.patch(recompile_limit=5):
        during_backward(lambda: seen.append(config.recompile_limit))
    assert seen == [5]


def test_an_error_inside_comes_out(patched: None) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        during_backward(fail)
    assert not C._is_key_in_tls("context") or C._get_obj_in_tls("context") is None
