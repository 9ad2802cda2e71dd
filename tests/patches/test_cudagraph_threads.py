"""What of the patch needs no GPU; with one, the patch's program runs the graphs."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
from interleaving import Worker

import torchcompat
from torchcompat.patches import cudagraph_threads

trees: Any = pytest.importorskip("torch._inductor.cudagraph_trees")


def test_where_torch_does_it_the_patch_stands_back() -> None:
    importlib.import_module("torch._inductor.compile_fx")
    state = torchcompat.plan(["cudagraph_threads"])["cudagraph_threads"].state.value
    assert state in (("fixed", "not_affected") if hasattr(trees, "_initialize_tls") else ("ok",))


def test_a_new_thread_gets_containers_of_its_own() -> None:
    first = cudagraph_threads._containers()
    assert cudagraph_threads._containers() is first
    other = Worker(lambda: (cudagraph_threads._containers(), cudagraph_threads._containers()))
    assert other.get()[0] is other.get()[1] is not first


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process in which nobody has graphs yet, each thread with containers of its own."""
    fresh = cudagraph_threads._Owner()
    monkeypatch.setattr(cudagraph_threads, "_owner", fresh)
    return fresh


def graphified() -> tuple[Any, list[int]]:
    captured: list[int] = []

    def original(model: Any, *args: Any, **kwargs: Any) -> Any:
        def with_graph(inputs: Any) -> Any:
            captured.append(threading.get_ident())
            return ("graph", *inputs)

        return with_graph

    return cudagraph_threads._cudagraphify(original)(
        lambda inputs: ("plain", *inputs), ()
    ), captured


def test_one_thread_has_graphs_and_the_others_run_without(owner: Any) -> None:
    run, captured = graphified()
    assert run([1]) == ("graph", 1)

    def other() -> Any:
        with pytest.warns(UserWarning, match="CUDA graphs are used in the thread 'MainThread'"):
            first = run([2])
        return first, run([3])

    assert Worker(other).get() == (("plain", 2), ("plain", 3))
    assert run([4]) == ("graph", 4)
    assert set(captured) == {threading.get_ident()}


def test_when_that_thread_has_ended_the_next_one_has_them(owner: Any) -> None:
    run, _ = graphified()
    assert Worker(lambda: run([1])).get() == ("graph", 1)
    assert run([2]) == ("graph", 2)
