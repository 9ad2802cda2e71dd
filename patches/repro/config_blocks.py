"""Two threads in blocks of torch that lift the recompile limit: the first to begin ends first."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import harness
from torch._dynamo import config
from torch._dynamo.utils import disable_cache_limit

entry: Any = next(iter(vars(config)["_config"].values()))
if not isinstance(getattr(entry, "user_override", None), contextvars.ContextVar):
    harness.not_applicable("settings are not per thread in this torch")
harness.warm_up()
harness.apply_always("config_inherit")  # with it an assignment is for all threads
harness.apply_patches("config_blocks")
before = config.recompile_limit
faults: list[str] = []


def block(inside: threading.Event, leave: threading.Event) -> int:
    with disable_cache_limit():
        inside.set()
        leave.wait(harness.WAIT_S)
        return int(config.recompile_limit)


events = [threading.Event() for _ in range(4)]
first = harness.Worker(lambda: block(events[0], events[1]))
events[0].wait(harness.WAIT_S)
second = harness.Worker(lambda: block(events[2], events[3]))
events[2].wait(harness.WAIT_S)
if config.recompile_limit != before:
    faults.append(f"another thread sees the block's limit: {config.recompile_limit}")
events[1].set()
first.finish()
events[3].set()
second.finish()
if second.result is None or second.result <= before:
    faults.append(f"the limit holds inside of the block: {second.result}")
if config.recompile_limit != before:
    faults.append(f"after overlapping blocks the recompile limit stays {config.recompile_limit}")
harness.verdict(faults)
