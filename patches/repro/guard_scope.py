"""A thread evaluates a guard's source while another builds a guard function."""

from __future__ import annotations

import threading
from typing import Any

import harness
import torch
import torch._dynamo.guards as guards
from torch._dynamo.source import AttrSource, LocalSource

harness.apply_patches("guard_scope")
harness.warm_up()

if not hasattr(AttrSource, "get_value"):
    harness.not_applicable("sources are not evaluated by themselves")
inside, between, leave = threading.Event(), threading.Event(), threading.Event()


class Slow:
    @property
    def value(self) -> int:
        inside.set()
        between.wait(harness.WAIT_S)
        return 1


class Holder:
    slow = Slow()


def evaluate() -> Any:
    """As the guards of an export do, without the compile lock."""
    source = AttrSource(AttrSource(LocalSource("x"), "slow"), "value")
    value = source.get_value({"L": {"x": Holder()}}, guards._get_closure_vars(), {})
    leave.set()
    return value


build = guards.build_guard_function


def between_names_and_values(*args: Any, **kwargs: Any) -> Any:
    """Let the other thread end its evaluation when the names have been read."""
    built = build(*args, **kwargs)
    between.set()
    leave.wait(harness.WAIT_S)
    return built


guards.build_guard_function = between_names_and_values
faults: list[str] = []
evaluating = harness.Worker(evaluate)
inside.wait(harness.WAIT_S)
# Two arguments that are one object: a guard in Python keeps them so.
function = torch.compile(lambda x, y: x + y, backend="eager")
x = torch.ones(5)
try:
    function(x, x)
except Exception as e:
    faults.append(f"a compile: {harness.first_line(e)[:110]}")
between.set()
if evaluating.finish().error is not None:
    faults.append(f"the evaluation: {harness.first_line(evaluating.error)[:80]}")
harness.verdict(faults)
