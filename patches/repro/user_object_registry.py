"""Two threads hand objects to their graphs by number; a third thing compiles meanwhile."""

from __future__ import annotations

import sys
import threading

import harness
import torch

try:
    import torch._dynamo.graph_bytecode_inputs as registry
except ImportError:
    print(f"torch {torch.__version__}: does not hand objects to graphs by number")
    sys.exit(2)

harness.warm_up()
harness.apply_patches("user_object_registry")
faults = []


class Thing:
    """Stands for a stream or an event."""


def read() -> object:
    """What a graph does with the number 0."""
    try:
        return registry.get_external_object_by_index(0)
    except AssertionError as e:
        return harness.first_line(e)


# 1. What a compiled call does right before its graph runs, in two threads.
ours, theirs = Thing(), Thing()
registry.store_user_object_weakrefs(ours)
stored, leave = threading.Event(), threading.Event()


def other() -> object:
    registry.store_user_object_weakrefs(theirs)
    stored.set()
    leave.wait(harness.WAIT_S)
    return read()


worker = harness.Worker(other)
stored.wait(harness.WAIT_S)
got = read()
if got is not ours:
    faults.append("a graph reads the object of another thread" if got is theirs else str(got))
registry.store_user_object_weakrefs(ours)
leave.set()
if worker.finish().result is not theirs:
    faults.append("and the other thread reads ours")

# 2. A compile in another thread.
registry.store_user_object_weakrefs(ours)
add = getattr(registry, "set_external_object_by_index", None)  # from 2.12
if add is not None:
    add(1, Thing())  # kept alive by the registry alone, as what a graph makes
harness.Worker(lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))).finish()
got = read()
if got is not ours:
    faults.append(f"after a compile in another thread: {got}")
try:
    add is None or registry.get_external_object_by_index(1)
except AssertionError as e:
    faults.append(f"after it, of an object that a graph made: {harness.first_line(e)}")

# 3. What must stay: autograd's threads store nothing and read what was stored last.
registry.store_user_object_weakrefs(ours)
if harness.Worker(read).finish().result is not ours:
    faults.append("a thread that stores nothing cannot read what was stored last")
harness.verdict(faults)
