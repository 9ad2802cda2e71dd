"""dynamo_reset: freeing compiled code waits for those who run it, and refuses rather than crash.

Calls are held in eager code inside a compiled call, where stock torch frees their code at once but
does not crash of it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import callback

import torchcompat

x = torch.ones(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


class Held:
    """A compiled function that stands still in its middle, and counts its compiles."""

    def __init__(self, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.compiles = 0
        self.meanwhile = meanwhile

        @torch._dynamo.disable
        def stand_still() -> None:
            self.inside.set()
            assert self.leave.wait(WAIT_S)
            self.meanwhile()

        def function(y: torch.Tensor) -> torch.Tensor:
            z = y.sin()
            stand_still()
            return z + 1

        self.compiled = torch.compile(function, backend=self._backend)

    def _backend(self, gm: torch.fx.GraphModule, _: Any) -> Any:
        self.compiles += 1
        return gm.forward

    def start(self) -> Worker:
        worker = Worker(lambda: self.compiled(x))
        assert self.inside.wait(WAIT_S)
        return worker


def pending_reset() -> tuple[Worker, threading.Event]:
    """A reset in a thread of its own, once it has had time to go wrong."""
    ended = threading.Event()
    worker = Worker(lambda: (torch._dynamo.reset(), ended.set()))
    ended.wait(0.3)
    return worker, ended


def test_reset_waits_for_the_call_under_way(patched: None) -> None:
    held = Held()
    call = held.start()
    reset, ended = pending_reset()
    waited = not ended.is_set()
    held.leave.set()
    torch.testing.assert_close(call.get(), x.sin() + 1)
    reset.get()
    assert waited
    before = held.compiles
    held.compiled(x)
    assert held.compiles > before, "the reset came to nothing"


def test_calls_that_begin_meanwhile_run_after_the_reset(patched: None) -> None:
    held = Held()
    other = torch.compile(lambda y: y.cos(), backend="eager")
    other(x)
    call = held.start()
    reset, _ = pending_reset()
    late = Worker(lambda: other(x))
    late.join(0.2)
    waited = late.is_alive()
    held.leave.set()
    call.get(), reset.get()
    torch.testing.assert_close(late.get(), x.cos())
    assert waited


def test_a_call_inside_the_call_under_way_does_not_wait(patched: None) -> None:
    other = torch.compile(lambda y: y.tan(), backend="eager")
    held = Held(meanwhile=lambda: other(x))
    call = held.start()
    reset, _ = pending_reset()
    held.leave.set()
    call.get(), reset.get()


@pytest.mark.parametrize("what", ["reset", "reset_code_caches"])
def test_refused_where_the_call_does_not_end(
    patched: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    call_gate = sys.modules["torchcompat.patches.call_gate"]  # loaded by apply()
    monkeypatch.setattr(call_gate, "TIMEOUT_S", 0.2)
    held = Held()
    call = held.start()
    call.name = "the busy one"
    compiles = held.compiles
    with pytest.raises(RuntimeError, match=r"gave up, nothing was changed.*: the busy one"):
        getattr(torch._dynamo, what)()
    Worker(lambda: torch.compile(lambda y: y.exp(), backend="eager")(x)).get()  # it is open again
    held.leave.set()
    call.get()
    first = held.compiles - compiles
    held.compiled(x)
    assert held.compiles - compiles == first, "something was freed"


def test_inside_a_compile_it_is_refused(patched: None) -> None:
    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        torch._dynamo.reset()
        return gm.forward

    with pytest.raises(Exception, match="called while this thread compiles"):
        torch.compile(lambda y: y.sin(), backend=backend)(x)
    torch._dynamo.reset()


def test_inside_a_compiled_call_of_the_same_thread_it_works(patched: None) -> None:
    held = Held(meanwhile=torch._dynamo.reset)
    held.leave.set()
    torch.testing.assert_close(Worker(lambda: held.compiled(x)).get(), x.sin() + 1)


def test_resets_of_several_threads_take_turns(patched: None) -> None:
    compiled = torch.compile(lambda y: y.sin(), backend="eager")
    for worker in [Worker(torch._dynamo.reset) for _ in range(4)]:
        worker.get()
    compiled(x)


def test_one_function_can_be_taken_out_alone(patched: None) -> None:
    held = Held()
    held.leave.set()
    held.compiled(x)
    compiles = held.compiles
    torch._dynamo.eval_frame.remove_from_cache(inspect.unwrap(held.compiled))
    held.compiled(x)
    assert held.compiles > compiles


def test_identity_and_code_are_restored() -> None:
    reset, code = torch._dynamo.reset, torch._dynamo.reset.__code__
    entry = torch._dynamo.eval_frame._callback_from_stance
    with torchcompat.applied(only=["dynamo_reset"]):
        assert torch._dynamo.reset is reset and reset.__doc__
        reset()
        assert torch._dynamo.eval_frame._callback_from_stance is entry
    assert reset.__code__ is code


def test_stacks_are_read_as_faulthandler_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcompat.patches import call_gate

    file = torch._dynamo.eval_frame.__file__

    def dump(text: Any, all_threads: bool) -> None:
        text.write(
            "Thread 0x0000000000000010 (most recent call first):\n"
            f'  File "{file}", line 7 in compile_wrapper\n\n'
            "Thread 0x0000000000000020 (most recent call first):\n"
            f'  File "{file}", line ??? in other\n'
            '  File "elsewhere.py", line 7 in compile_wrapper\n\n'
            "Current thread 0x0000000000000030 [name] (most recent call first):\n"
            '  File "deep.py", line 7 in f\n'
            "  ...\n"
            "...\n"
        )

    monkeypatch.setattr(call_gate.faulthandler, "dump_traceback", dump)
    assert call_gate.threads_in({"compile_wrapper"}) == [0x10, 0x30, 0]


@pytest.mark.skipif(
    "pending_callbacks" not in inspect.getsource(callback.CompilationCallbackHandler.clear),
    reason="this torch does not ask",
)
def test_a_backward_that_another_thread_compiles_does_not_make_it_fail(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    def compile_backward() -> None:
        trigger = callback.CallbackTrigger.LAZY_BACKWARD
        with callback.callback_handler.install_callbacks(trigger, "0/0"):
            inside.set()
            assert leave.wait(WAIT_S)

    worker = Worker(compile_backward)
    assert inside.wait(WAIT_S)
    try:
        torch._dynamo.reset()
    finally:
        leave.set()
        worker.get()
