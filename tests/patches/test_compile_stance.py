from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch.compiler import set_stance

from torchcompat.patches import compile_stance

x = torch.randn(4)


@pytest.fixture(autouse=True)
def _default_stance() -> Iterator[None]:
    yield
    torch._dynamo.eval_frame._stance = type(torch._dynamo.eval_frame._stance)()


def stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


class Block:
    """A thread inside a `with set_stance(…)`, until it is let go."""

    def __init__(self, name: str) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.name = name
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> tuple[str, str, str]:
        before = stance()
        with set_stance(self.name):
            self.inside.set()
            assert self.leave.wait(WAIT_S)
            during = stance()
        return before, during, stance()

    def end(self) -> tuple[str, str, str]:
        self.leave.set()
        found: tuple[str, str, str] = self.worker.get()
        return found


def compiles() -> int:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(
        torch.compile(lambda y: y.sin() + 1, backend=backend)(x), x.sin() + 1
    )
    return len(graphs)


def test_a_block_holds_in_its_own_thread(patched: None) -> None:
    block = Block("force_eager")
    assert stance() == "default"
    assert compiles() == 1
    assert Worker(compiles).get() == 1
    assert block.end() == ("default", "force_eager", "default")


def test_blocks_that_overlap_leave_nothing_behind(patched: None) -> None:
    first = Block("force_eager")
    second = Block("fail_on_recompile")
    assert first.end() == ("default", "force_eager", "default")
    assert second.end() == ("default", "fail_on_recompile", "default")
    assert stance() == Worker(stance).get() == "default"


def test_a_plain_call_is_for_threads_without_a_block(patched: None) -> None:
    block = Block("fail_on_recompile")
    set_stance("force_eager")
    gc.collect()
    assert stance() == Worker(stance).get() == "force_eager"
    assert Worker(compiles).get() == 0
    assert block.end() == ("default", "fail_on_recompile", "force_eager")
    set_stance("default")
    assert Worker(stance).get() == "default"
    assert compiles() == 1


def test_nested_blocks_and_a_plain_call_inside_one(patched: None) -> None:
    with set_stance("force_eager"):
        with set_stance("eager_on_recompile"):
            assert stance() == "eager_on_recompile"
            set_stance("fail_on_recompile")  # until the block ends, as torch has it
            assert stance() == "fail_on_recompile"
            assert Worker(stance).get() == "default"
        assert stance() == "force_eager"
    assert stance() == "default"


def test_a_decorated_function_is_a_block(patched: None) -> None:
    inside, leave = threading.Event(), threading.Event()

    @set_stance("force_eager")
    def work() -> int:
        inside.set()
        assert leave.wait(WAIT_S)
        return compiles()

    assert stance() == Worker(stance).get() == "default"
    worker = Worker(work)
    assert inside.wait(WAIT_S)
    assert compiles() == 1
    leave.set()
    assert worker.get() == 0


def test_an_error_in_a_block_and_bad_stances_leave_it_as_it_was(patched: None) -> None:
    with pytest.raises(ZeroDivisionError), set_stance("force_eager"):
        raise ZeroDivisionError
    assert stance() == "default"
    with pytest.raises(RuntimeError, match="force_backend"):
        set_stance("force_eager", force_backend="eager")
    assert stance() == "default"
    assert Worker(stance).get() == "default"


def test_a_stance_inside_of_compiled_code_is_still_refused(patched: None) -> None:
    @torch.compile(backend="eager")
    def function(y: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        return y + 1

    with pytest.raises((AssertionError, RuntimeError)):
        function(x)
    assert stance() == "default"


def test_skipped_guards_are_refused_where_other_threads_would_skip_them_too(
    patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_stance, "is_shared", lambda *_: True)
    block = Block("default")
    with pytest.warns(UserWarning, match="skip_guard_eval_unsafe is ignored"):
        with set_stance("default", skip_guard_eval_unsafe=True):
            assert not torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe
    block.end()
    monkeypatch.setattr(compile_stance, "is_shared", lambda *_: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with set_stance("default", skip_guard_eval_unsafe=True):
            assert torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe
