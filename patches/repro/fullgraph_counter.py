"""Fullgraph calls of two threads, compiled long ago: one ends and begins while another runs."""

from __future__ import annotations

import sys
import threading
from typing import Any

import harness
import torch

eval_frame: Any = torch._dynamo.eval_frame
if not hasattr(eval_frame, "set_fullgraph_compiled_frame_count"):
    harness.not_applicable("this torch does not count the frames of fullgraph calls")
harness.warm_up()
harness.apply_patches("fullgraph_counter")
x = torch.randn(4)
faults: list[str] = []
function = torch.compile(lambda y: y.sin() + 1, backend="eager", fullgraph=True)
function(x)

# The thread is held between its compiled frame and the look at the counter, where it may lose the
# interpreter at any time: where the call's wrapper says `set_eval_frame(None)` for the second time.
inside, leave = threading.Event(), threading.Event()
set_eval_frame = eval_frame.set_eval_frame
seen = threading.local()


def held(callback: Any) -> Any:
    result = set_eval_frame(callback)
    by_wrapper = sys._getframe(1).f_code.co_name == "compile_wrapper"
    seen.calls = getattr(seen, "calls", 0) + (callback is None and by_wrapper)
    if threading.current_thread() is first and seen.calls == 2:
        inside.set()
        leave.wait(harness.WAIT_S)
    return result


go = threading.Event()


def call() -> Any:
    go.wait(harness.WAIT_S)
    return function(x)


first = harness.Worker(call)
eval_frame.set_eval_frame = held
go.set()
inside.wait(harness.WAIT_S)


def begin() -> None:
    """The very last step of a call that ended before, and the first step of the next one."""
    eval_frame.set_fullgraph_compiled_frame_count(-1)
    eval_frame.set_fullgraph_compiled_frame_count(0)
    leave.set()
    first.finish()
    eval_frame.set_fullgraph_compiled_frame_count(-1)


harness.Worker(begin).finish()
eval_frame.set_eval_frame = set_eval_frame
if not inside.is_set():
    faults.append("the call was not held where it should be")
if first.error is not None:
    faults.append(f"a compiled call raised {harness.first_line(first.error)[:90]}")


# What must stay: a call around which nothing is counted is told so where it is alone.
def uncounted() -> bool:
    begun = eval_frame.set_fullgraph_compiled_frame_count(0)
    ended = eval_frame.set_fullgraph_compiled_frame_count(-1)
    return bool(begun == -1 and ended == 0)


if not faults and not harness.Worker(uncounted).finish().result:
    faults.append("a lone call that compiles nothing is no longer told so")
harness.verdict(faults)
