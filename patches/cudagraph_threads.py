"""cudagraph_threads: CUDA graphs of `mode="reduce-overhead"` know only the thread that was first.

Up to torch 2.12 the state of CUDA graph trees is thread-local and only initialised in the thread
that imports the module: in any other one a bare `AssertionError` (at `_is_key_in_tls`) ends the
first call. And a compiled function keeps one captured graph for all threads, whose static inputs
and outputs they overwrite for each other: silently wrong numbers. torch 2.13 has both per thread.

Graphs in several threads cannot be mended from outside (captures, memory pools and step counters of
the process are made for one), so the main thread has them, and autograd's threads while they work
for it. Every other thread runs the same compiled code without a graph, and is told so once. Which
thread that is must not depend on who comes first: a program would be right or wrong by chance.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import warnings
from collections import defaultdict
from typing import Any, Final

from torchcompat.patch import Patch, Replace
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_TREES: Final = "torch._inductor.cudagraph_trees"
_COMPILE_FX: Final = "torch._inductor.compile_fx"
_CONTAINERS: Final = "tree_manager_containers"


def _recognise() -> Finding:
    function = inspect.unwrap(sys.modules[_COMPILE_FX].cudagraphify)
    if "thread_local" in function.__code__.co_varnames + function.__code__.co_cellvars:
        return Finding("fixed", "each thread has CUDA graphs of its own here")
    return Finding("ok", "a compiled function has one CUDA graph for all threads")


def _given() -> Any:
    """The graph trees of this thread, or of the one that autograd's thread works for; or None."""
    # Imported by the first capture, so that the patch cannot wait for it.
    trees: Any = importlib.import_module(_TREES)
    torch: Any = sys.modules["torch"]
    mine = getattr(trees.local, _CONTAINERS, None)
    if mine is None and torch._C._is_key_in_tls(_CONTAINERS):
        mine = torch._C._get_obj_in_tls(_CONTAINERS)
    return mine


def _made() -> Any:
    """The same for the main thread, where another one has imported the module: made as importing it
    makes them."""
    given = _given()
    if given is not None:
        return given
    trees: Any = sys.modules[_TREES]
    torch: Any = sys.modules["torch"]
    trees.local.tree_manager_containers = {}
    trees.local.tree_manager_locks = defaultdict(threading.Lock)
    # Autograd's threads get these two from the thread that calls backward().
    for name in (_CONTAINERS, "tree_manager_locks"):
        torch._C._stash_obj_in_tls(name, getattr(trees.local, name))
    return trees.local.tree_manager_containers


class _Owner:
    """The main thread, known by its containers, which autograd's threads share."""

    def __init__(self) -> None:
        self._containers: Any = None
        self._told = False

    def is_this_thread(self) -> bool:
        if threading.current_thread() is threading.main_thread():
            self._containers = _made()
            return True
        return self._containers is not None and self._containers is _given()

    def tell_others(self) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                "CUDA graphs are used in the main thread only: up to torch 2.12 they are wrong in "
                f"several threads. The thread {threading.current_thread().name!r} runs compiled "
                "code without them (torchcompat, cudagraph_threads)",
                stacklevel=3,
            )


_owner: Final = _Owner()


def _cudagraphify(original: Any) -> Any:
    def cudagraphify(model: Any, *args: Any, **kwargs: Any) -> Any:
        with_graph = original(model, *args, **kwargs)

        def run(new_inputs: Any) -> Any:
            if _owner.is_this_thread():
                return with_graph(new_inputs)
            _owner.tell_others()
            return model(new_inputs)

        return run

    return cudagraphify


PATCH = Patch(
    id="cudagraph_threads",
    title="CUDA graphs must not be shared by threads",
    why=(
        "A function compiled with mode='reduce-overhead' returns silently wrong numbers when "
        "several threads call it, and training in threads ends in a bare AssertionError at "
        "_is_key_in_tls."
    ),
    affects=">=2.6.0.dev0,<2.13.0.dev0",
    fixed_in="2.13",
    recognise=_recognise,
    edits=(
        Replace(
            target=f"{_COMPILE_FX}:cudagraphify",
            factory=_cudagraphify,
            anchors=("compiled_fn = None", "nonlocal compiled_fn", "cudagraphify_fn(model"),
        ),
    ),
    repro="repro/cudagraph_threads.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/123177",
        "https://github.com/pytorch/pytorch/pull/184357",
    ),
    signs=(
        Sign(
            text=r"^AssertionError:?$",
            raised_in="torch/_inductor/cudagraph_trees.py:get_obj",
            source="_is_key_in_tls",
        ),
        Sign(
            text="accessing tensor output of CUDAGraphs that has been overwritten by a subsequent",
            in_thread=True,
            sure=False,  # one thread that keeps outputs over two steps says the same
        ),
    ),
)
