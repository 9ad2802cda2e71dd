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


def test_the_main_thread_has_containers_whoever_imported_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "local", threading.local())
    monkeypatch.setattr(
        cudagraph_threads.sys.modules["torch"]._C, "_is_key_in_tls", lambda _: False
    )
    stashed: dict[str, Any] = {}
    monkeypatch.setattr(
        cudagraph_threads.sys.modules["torch"]._C, "_stash_obj_in_tls", stashed.__setitem__
    )
    first = cudagraph_threads._made()
    assert cudagraph_threads._made() is cudagraph_threads._given() is first
    assert stashed == {
        "tree_manager_containers": first,
        "tree_manager_locks": trees.local.tree_manager_locks,
    }
    assert Worker(cudagraph_threads._given).get() is None


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


def test_the_main_thread_has_graphs_and_the_others_run_without(owner: Any) -> None:
    run, captured = graphified()

    def other() -> Any:
        with pytest.warns(UserWarning, match="CUDA graphs are used in the main thread only"):
            first = run([2])
        return first, run([3])

    assert Worker(other).get() == (("plain", 2), ("plain", 3)), "though it came first"
    assert run([1]) == ("graph", 1)
    assert Worker(lambda: run([3])).get() == ("plain", 3)
    assert run([4]) == ("graph", 4)
    assert set(captured) == {threading.get_ident()}


def test_a_thread_that_works_for_the_main_thread_has_them(owner: Any) -> None:
    run, _ = graphified()
    run([0])
    of_main = cudagraph_threads._given()

    def for_main() -> Any:  # as autograd's threads are given what the caller of backward() has
        trees.local.tree_manager_containers = of_main
        return run([1])

    assert Worker(for_main).get() == ("graph", 1)
