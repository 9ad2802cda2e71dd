from __future__ import annotations

import gc
import importlib
import pickle
import threading
from typing import Any

import pytest
from interleaving import WAIT_S, Worker

heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")


class Kernel(heuristics.CachingAutotuner):  # type: ignore[misc]
    """Measures by standing still until it is let go."""

    def __init__(self, fails: int = 0) -> None:
        self.launchers = ["a", "b"]
        self.fails = fails
        self.runs = 0
        self.inside, self.leave = threading.Event(), threading.Event()

    def benchmark_all_configs(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        self.inside.set()
        assert self.leave.wait(WAIT_S)
        if self.runs <= self.fails:
            raise ValueError("measuring failed")
        self.launchers = [Chosen()]  # the rest of the method is about this one
        return {self.launchers[0]: 1.0}

    def __reduce__(self) -> Any:
        return (Kernel, (self.fails,), {"launchers": self.launchers})

    precompile_time_taken_ns = 0
    save_cache_hook = None
    compile_results: tuple[Any, ...] = ()
    fn: Any = type("Function", (), {"__name__": "kernel"})


class Chosen:
    config = cache_hash = "a"
    n_regs = n_spills = shared = 0


def first_call(kernel: Kernel) -> Any:
    if len(kernel.launchers) > 1:
        kernel.autotune_to_one_config()
    return kernel.launchers[0]


def test_who_waited_takes_what_was_chosen(patched: None) -> None:
    kernel = Kernel()
    first = Worker(lambda: first_call(kernel))
    assert kernel.inside.wait(WAIT_S)
    others = [Worker(lambda: first_call(kernel)) for _ in range(3)]
    kernel.leave.set()
    assert {id(w.get()) for w in others} == {id(first.get())}
    assert kernel.runs == 1


def test_kernels_do_not_wait_for_each_other(patched: None) -> None:
    one, other = Kernel(), Kernel()
    first = Worker(lambda: first_call(one))
    assert one.inside.wait(WAIT_S)
    other.leave.set()
    Worker(lambda: first_call(other)).get()
    one.leave.set()
    first.get()


def test_after_a_failure_the_next_one_measures(patched: None) -> None:
    kernel = Kernel(fails=1)
    first = Worker(lambda: first_call(kernel))
    assert kernel.inside.wait(WAIT_S)
    second = Worker(lambda: first_call(kernel))
    kernel.leave.set()
    with pytest.raises(ValueError, match="measuring failed"):
        first.get()
    second.get()
    assert kernel.runs == 2


def test_a_kernel_is_pickled_and_freed_as_before(patched: None) -> None:
    from torchcompat.patches import inductor_autotuner

    kernel = Kernel()
    kernel.leave.set()
    known = len(inductor_autotuner._locks)
    first_call(kernel)
    assert all("lock" not in name for name in vars(kernel))
    pickle.dumps(kernel)
    assert len(inductor_autotuner._locks) == known + 1
    del kernel
    gc.collect()
    assert len(inductor_autotuner._locks) == known
