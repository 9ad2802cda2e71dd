"""The storage of `Autotuner.nargs`; the kernels themselves need a GPU (the patch's program)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from interleaving import Worker

from torchcompat.patches.triton_autotuner import PerThread


class Kernel:
    nargs: Any = PerThread()


def test_each_thread_and_each_kernel_has_its_own() -> None:
    first, second = Kernel(), Kernel()
    first.nargs = {"n": 1}
    second.nargs = {"n": 2}
    barrier = threading.Barrier(3, timeout=20)

    def call(value: int) -> Any:
        with pytest.raises(AttributeError, match="no call of this kernel is under way"):
            _ = first.nargs
        first.nargs = {"n": value}
        barrier.wait()
        found = first.nargs
        barrier.wait()
        first.nargs = None
        return found

    workers = [Worker(lambda i=i: call(i)) for i in (7, 8)]
    barrier.wait()
    assert first.nargs == {"n": 1}
    barrier.wait()
    assert [worker.get() for worker in workers] == [{"n": 7}, {"n": 8}]
    assert first.nargs == {"n": 1}
    assert second.nargs == {"n": 2}
