"""Settings assigned in the main thread, asked for in another; patches that keep to their thread."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import harness
from torch._dynamo import config
from torch._inductor import config as inductor_config

entry: Any = next(iter(vars(config)["_config"].values()))
if not isinstance(getattr(entry, "user_override", None), contextvars.ContextVar):
    harness.not_applicable("settings are not per thread in this torch")
harness.warm_up()
config.recompile_limit = 31  # before apply() too
harness.apply_patches("config_inherit")
faults: list[str] = []


def seen() -> tuple[Any, ...]:
    return config.recompile_limit, inductor_config.max_autotune, config.cache_size_limit


inductor_config.max_autotune = True
here, there = seen(), harness.Worker(seen).finish().result
if there != here:
    faults.append(f"the main thread set {here}, a new thread sees {there}")

# A patch is its thread's own, and leaves nothing.
inside, leave = threading.Event(), threading.Event()


def patched() -> int:
    with config.patch(recompile_limit=5):
        inside.set()
        leave.wait(harness.WAIT_S)
        return int(config.recompile_limit)


holder = harness.Worker(patched)
inside.wait(harness.WAIT_S)
if config.recompile_limit != 31:
    faults.append(f"a patch of another thread is seen: {config.recompile_limit}")
leave.set()
if holder.finish().result != 5:
    faults.append(f"a patch does not hold in its own thread: {holder.result}")
with config.patch(recompile_limit=7):
    pass
config.recompile_limit = 33
if not faults and harness.Worker(lambda: config.recompile_limit).finish().result != 33:
    faults.append("an assignment after a patch is not seen by other threads")

# The hash, the key of compile caches, follows the values that the thread sees.
before = harness.Worker(inductor_config.get_hash).finish().result
inductor_config.max_autotune = False
own, other = inductor_config.get_hash(), harness.Worker(inductor_config.get_hash).finish().result
if not faults and (own != other or own == before):
    faults.append("the hash of the configuration is another thread's")
harness.verdict(faults)
