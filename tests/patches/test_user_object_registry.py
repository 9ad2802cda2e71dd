"""user_object_registry: what a compiled call hands to its graph by number stays its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker

import torchcompat

registry: Any = pytest.importorskip("torch._dynamo.graph_bytecode_inputs")
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(torch.ones(4))


class Thing:
    """Stands for a stream or an event."""


def compile_something() -> None:
    torch.compile(lambda y: y.sin(), backend="eager")(torch.ones(4))


def test_threads_read_what_they_stored(patched: None) -> None:
    things = [Thing() for _ in range(3)]
    stored = threading.Barrier(3)

    def call(thing: Thing) -> Any:
        registry.store_user_object_weakrefs(thing)
        stored.wait(WAIT_S)
        return registry.get_external_object_by_index(0)

    workers = [Worker(lambda t=t: call(t)) for t in things]
    assert [w.get() for w in workers] == things


def test_a_compile_in_another_thread_clears_nothing_here(patched: None) -> None:
    thing = Thing()
    registry.store_user_object_weakrefs(thing)
    made = registry.stash_graph_created_object(Thing())
    Worker(compile_something).get()
    assert registry.get_external_object_by_index(0) is thing
    assert made in registry.keep_alive


def test_a_compile_in_the_same_thread_clears(patched: None) -> None:
    registry.store_user_object_weakrefs(Thing())
    registry.stash_graph_created_object(Thing())
    registry.reset_user_object_tracking()
    assert not registry.keep_alive
    with pytest.raises(AssertionError, match="Index not registered"):
        registry.get_external_object_by_index(0)


def test_a_thread_that_stores_nothing_reads_the_last_table(patched: None) -> None:
    """As autograd's threads do, call after call."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    seen: list[Any] = []

    def backward() -> None:
        for _ in range(2):
            assert asked.acquire(timeout=WAIT_S)
            seen.append(registry.get_external_object_by_index(0))
            answered.release()

    worker = Worker(backward)
    things = [Thing(), Thing()]
    for thing in things:
        registry.store_user_object_weakrefs(thing)
        asked.release()
        assert answered.acquire(timeout=WAIT_S)
    worker.get()
    assert seen == things


def test_a_later_call_replaces_the_whole_table(patched: None) -> None:
    first, second = Thing(), Thing()
    registry.store_user_object_weakrefs(first, first)
    registry.store_user_object_weakrefs(second)
    assert registry.get_external_object_by_index(0) is second
    with pytest.raises(AssertionError, match="Index not registered"):
        registry.get_external_object_by_index(1)


@pytest.mark.skipif(
    not hasattr(registry, "set_external_object_by_index"), reason="torch has no way to add one"
)
def test_objects_added_while_running(patched: None) -> None:
    thing, other = Thing(), Thing()
    registry.store_user_object_weakrefs(thing)
    registry.set_external_object_by_index(1, other)
    Worker(lambda: registry.store_user_object_weakrefs(Thing())).get()
    assert registry.get_external_object_by_index(1) is other


def test_functions_and_module_are_restored() -> None:
    codes = {n: f.__code__ for n, f in vars(registry).items() if hasattr(f, "__code__")}
    table, cls = registry.index_to_external_object_weakref, type(registry)
    with torchcompat.applied(only=["user_object_registry"]):
        assert type(registry) is not cls
        registry.store_user_object_weakrefs(Thing())
    assert registry.index_to_external_object_weakref is table
    assert type(registry) is cls
    assert {n: f.__code__ for n, f in vars(registry).items() if hasattr(f, "__code__")} == codes
