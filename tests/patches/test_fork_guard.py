"""fork_guard: a child has no locks of threads that it does not have."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import convert_frame

import torchcompat

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
x = torch.ones(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


def in_a_child(work: Callable[[], bool]) -> str:
    """How a forked child fares that does `work`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking with threads is what is tested
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return {0: "right", 1: "wrong"}.get(os.waitstatus_to_exitcode(status), "failed")
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "stuck"


class LockHolder:
    """Another thread that has the compile lock."""

    def __enter__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.worker = Worker(self._hold)
        assert self.inside.wait(WAIT_S)

    def _hold(self) -> None:
        with convert_frame.compile_lock:
            self.inside.set()
            assert self.leave.wait(WAIT_S)

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self.worker.get()


def lock_is_free() -> bool:
    return convert_frame.compile_lock.acquire(timeout=2)


def test_a_child_can_compile_beside_a_compile(patched: None) -> None:
    compiled = torch.compile(lambda y: y.sin() + 1, backend="eager")
    with LockHolder():
        assert in_a_child(lambda: torch.equal(compiled(x), x.sin() + 1)) == "right"


def test_the_parents_lock_stays_held(patched: None) -> None:
    with LockHolder():
        assert in_a_child(lock_is_free) == "right"
        assert not Worker(lambda: convert_frame.compile_lock.acquire(blocking=False)).get()


def test_a_lock_of_the_thread_that_forks_stays_its_own(patched: None) -> None:
    def still_owned() -> bool:
        others = Worker(lambda: convert_frame.compile_lock.acquire(blocking=False))
        return convert_frame.compile_lock._is_owned() and not others.get()

    with convert_frame.compile_lock:
        assert in_a_child(still_owned) == "right"


def test_taken_away_it_does_nothing() -> None:
    with torchcompat.applied(only=["fork_guard"]):
        pass
    with LockHolder():
        assert in_a_child(lock_is_free) == "wrong"
