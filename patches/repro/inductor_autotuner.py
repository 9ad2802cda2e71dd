"""Two threads' first calls of one kernel with two configurations; kernels that launch nothing."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import harness

harness.apply_patches("inductor_autotuner")
heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
#: How long the first thread lets the second one come, which with the patch it does not.
GRACE_S = 1.0


class Kernel:
    """What a static launcher's globals lead to."""

    def __init__(self) -> None:
        self.loaded = True

    def run(self) -> None:
        assert self.loaded, "called after it was unloaded"

    def close(self) -> None:
        self.loaded = False


class Config:
    num_warps = num_stages = 1

    def __init__(self, name: str) -> None:
        self.kwargs = {"name": name}


class Launcher:
    _is_static = True
    n_regs = n_spills = shared = 0

    def __init__(self, name: str) -> None:
        self.name = self.cache_hash = name
        self.config = Config(name)
        self.kernel = Kernel()
        self.__globals__ = {"runner": self.kernel.run}


class Result:
    def __init__(self, launcher: Launcher) -> None:
        self.config = launcher.config


class Measured(heuristics.CachingAutotuner):  # type: ignore[misc]
    """The first thread sees the first configuration win, the second one the second."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.launchers = [Launcher("a"), Launcher("b")]
        self.compile_results = [Result(launcher) for launcher in self.launchers]
        self.inductor_meta: dict[str, Any] = {}
        self.compile_id = self.save_cache_hook = None
        self.is_backward = False
        self.reset_to_zero_arg_names: list[str] = []
        self.precompile_time_taken_ns = 0
        self.coordesc_tuner = self.fn = self
        self.measured: list[str] = []

    def cache_benchmark_result(self, *_: Any) -> None:
        pass

    def bench(self, launcher: Launcher, *_: Any, **__: Any) -> float:
        me = threading.current_thread()
        if me is not second:
            begun.set()
            if launcher.name == "b":
                passed.wait(GRACE_S)
        self.measured.append(launcher.name)
        launcher.kernel.run()
        if me is second and launcher.name == "b":
            passed.set()
        return 1.0 if (launcher.name == "a") == (me is not second) else 2.0


def call() -> None:
    """What `CachingAutotuner.run` does, where it launches."""
    if len(kernel.launchers) > 1:
        kernel.autotune_to_one_config()
    (launcher,) = kernel.launchers
    launcher.kernel.run()


begun, passed, go = threading.Event(), threading.Event(), threading.Event()


def later() -> None:
    go.wait(harness.WAIT_S)
    call()


second = harness.Worker(later)
kernel = Measured()
first = harness.Worker(call)
begun.wait(harness.WAIT_S)
go.set()
faults: list[str] = []
for worker in (first.finish(), second.finish()):
    if worker.error is not None:
        faults.append(f"a first call raised {harness.first_line(worker.error)}")
if kernel.measured != ["a", "b"]:
    faults.append(f"{len(kernel.measured)} measurements of two configurations")
harness.verdict(faults)
