"""cudagraph_threads: CUDA graphs of `mode="reduce-overhead"` know only the thread that was first.

Up to torch 2.12 the state of CUDA graph trees is thread-local and only initialised in the thread
that imports the module: in any other one a bare `AssertionError` (at `_is_key_in_tls`) ends the
first call. And a compiled function keeps one captured graph for all threads, whose static inputs
and outputs they overwrite for each other: silently wrong numbers. torch 2.13 has both per thread.

The state is initialised in each thread that asks for it, each thread captures its own graph of a
compiled function, and captures and warm-ups, which are process-wide states of CUDA, do not overlap.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any, Final

from torchcompat.patch import Patch, Replace, Wrap
from torchcompat.verdict import Finding

_TREES: Final = "torch._inductor.cudagraph_trees"
_COMPILE_FX: Final = "torch._inductor.compile_fx"
_capturing: Final = threading.RLock()


def _recognise() -> Finding:
    if hasattr(sys.modules[_TREES], "_initialize_tls"):
        return Finding("fixed", "each thread has CUDA graph trees of its own here")
    return Finding("ok", "CUDA graph trees are initialised in one thread only")


def _get_obj(original: Any) -> Any:
    def get_obj(local: Any, attr_name: str) -> Any:
        import torch

        if not hasattr(local, attr_name) and not torch._C._is_key_in_tls(attr_name):
            local.tree_manager_containers = {}
            local.tree_manager_locks = defaultdict(threading.Lock)
            # Autograd's threads get these two from the thread that calls backward().
            for name in ("tree_manager_containers", "tree_manager_locks"):
                torch._C._stash_obj_in_tls(name, getattr(local, name))
        return original(local, attr_name)

    return get_obj


def _cudagraphify(original: Any) -> Any:
    def cudagraphify(*args: Any, **kwargs: Any) -> Any:
        mine = threading.local()
        first = original(*args, **kwargs)  # made now: it notes which compile it belongs to
        unused = [first]

        def run(new_inputs: Any) -> Any:
            function = getattr(mine, "function", None)
            if function is None:
                function = unused.pop() if unused else original(*args, **kwargs)
                mine.function = function
            return function(new_inputs)

        return run

    return cudagraphify


def _one_at_a_time(original: Any) -> Any:
    def capture(*args: Any, **kwargs: Any) -> Any:
        with _capturing:
            return original(*args, **kwargs)

    return capture


_MANAGER: Final = f"{_TREES}:CUDAGraphTreeManager"

PATCH = Patch(
    id="cudagraph_threads",
    title="Threads must have CUDA graphs of their own",
    why=(
        "A function compiled with mode='reduce-overhead' returns silently wrong numbers when "
        "several threads call it, and training in threads ends in a bare AssertionError at "
        "_is_key_in_tls."
    ),
    affects=">=2.6.0.dev0,<2.13.0.dev0",
    fixed_in="2.13",
    recognise=_recognise,
    edits=(
        Wrap(
            target=f"{_TREES}:get_obj",
            factory=_get_obj,
            signature=("local", "attr_name"),
            anchors=("_is_key_in_tls(attr_name)", "_get_obj_in_tls(attr_name)"),
        ),
        Replace(
            target=f"{_COMPILE_FX}:cudagraphify",
            factory=_cudagraphify,
            anchors=("compiled_fn = None", "nonlocal compiled_fn", "cudagraphify_fn(model"),
        ),
        Wrap(target=f"{_MANAGER}.__init__", factory=_one_at_a_time),
        Wrap(
            target=f"{_MANAGER}.record_function",
            factory=_one_at_a_time,
            anchors=("CUDAGraphNode(",),
        ),
        Wrap(target=f"{_MANAGER}.run_eager", factory=_one_at_a_time, anchors=("CUDAWarmupNode(",)),
    ),
    repro="repro/cudagraph_threads.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/123177",
        "https://github.com/pytorch/pytorch/pull/184357",
    ),
)
