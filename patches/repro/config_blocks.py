"""Two threads in blocks of torch that lift the recompile limit: the first to begin ends first."""

from __future__ import annotations

import threading

import harness
from torch._dynamo import config
from torch._dynamo.utils import disable_cache_limit

harness.warm_up()
harness.apply_always("config_inherit", "config_patch_leak")  # an assignment is for all threads
harness.apply_patches("config_blocks")
LIMIT = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
before = getattr(config, LIMIT)
faults: list[str] = []


def block(inside: threading.Event, leave: threading.Event) -> int:
    with disable_cache_limit():
        inside.set()
        leave.wait(harness.WAIT_S)
        return int(getattr(config, LIMIT))


events = [threading.Event() for _ in range(4)]
first = harness.Worker(lambda: block(events[0], events[1]))
events[0].wait(harness.WAIT_S)
second = harness.Worker(lambda: block(events[2], events[3]))
events[2].wait(harness.WAIT_S)
if getattr(config, LIMIT) != before:
    faults.append(f"another thread sees the block's limit: {getattr(config, LIMIT)}")
events[1].set()
first.finish()
events[3].set()
second.finish()
if second.result is None or second.result <= before:
    faults.append(f"the limit holds inside of the block: {second.result}")
if getattr(config, LIMIT) != before:
    faults.append(f"after overlapping blocks the recompile limit stays {getattr(config, LIMIT)}")
harness.verdict(faults)
