"""Two threads in `config.patch()` blocks of one setting: the first to begin ends first."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import harness
from torch._dynamo import config
from torch._inductor import config as inductor_config

entry: Any = next(iter(vars(config)["_config"].values()))
if isinstance(getattr(entry, "user_override", None), contextvars.ContextVar):
    harness.not_applicable("settings are per thread in this torch")
harness.warm_up()
harness.apply_patches("config_patch_leak")
LIMIT = "recompile_limit" if "recompile_limit" in vars(config)["_config"] else "cache_size_limit"
before = getattr(config, LIMIT)
hash_before = inductor_config.get_hash()
faults: list[str] = []


def limit() -> int:
    return int(getattr(config, LIMIT))


def block(value: int, inside: threading.Event, leave: threading.Event) -> tuple[int, bool]:
    with config.patch({LIMIT: value}), inductor_config.patch(epilogue_fusion=False):
        inside.set()
        leave.wait(harness.WAIT_S)
        return limit(), inductor_config.get_hash() == hash_before


events = [threading.Event() for _ in range(4)]
first = harness.Worker(lambda: block(101, events[0], events[1]))
events[0].wait(harness.WAIT_S)
if limit() != before:
    faults.append(f"another thread sees the block's limit: {limit()}")
second = harness.Worker(lambda: block(202, events[2], events[3]))
events[2].wait(harness.WAIT_S)
events[1].set()
first.finish()
events[3].set()
second.finish()
for value, worker in ((101, first), (202, second)):
    if worker.result != (value, False):
        faults.append(f"inside of the block with {value}: {worker.result or worker.error!r}")
if limit() != before:
    faults.append(f"after overlapping blocks the limit stays {limit()}, not {before}")
if inductor_config.get_hash() != hash_before:
    faults.append("after the blocks the hash of the configuration is another")
if not faults:  # an assignment is for all threads, as it was
    setattr(config, LIMIT, 33)
    if harness.Worker(limit).finish().result != 33:
        faults.append("an assignment is not seen by other threads")
harness.verdict(faults)
