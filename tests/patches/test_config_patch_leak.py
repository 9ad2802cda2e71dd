"""What `config_patch_leak` does beyond what settings mean everywhere (test_config_inherit)."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import config
from torch._inductor import config as inductor_config

import torchcompat

_ENTRY: Any = next(iter(vars(config)["_config"].values()))
pytestmark = pytest.mark.skipif(
    isinstance(getattr(_ENTRY, "user_override", None), contextvars.ContextVar),
    reason="settings are per thread in this torch",
)
LIMIT = "recompile_limit" if "recompile_limit" in vars(config)["_config"] else "cache_size_limit"


def limit() -> int:
    return int(getattr(config, LIMIT))


def everywhere(look: Callable[[], Any] = limit) -> tuple[Any, Any]:
    return look(), Worker(look).get()


def test_one_decorator_in_two_threads_at_once(patched: None) -> None:
    both = threading.Barrier(2)

    @config.patch({LIMIT: 5})
    def work() -> int:
        both.wait(WAIT_S)
        seen = limit()
        both.wait(WAIT_S)
        return seen

    before = limit()
    workers = [Worker(work), Worker(work)]
    assert [w.get() for w in workers] == [5, 5]
    assert everywhere() == (before, before)


def test_blocks_need_not_end_in_order(patched: None) -> None:
    before = limit()
    outer, inner = config.patch({LIMIT: 5}), config.patch(verbose=True)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert (limit(), config.verbose) == (before, True)
    inner.__exit__(None, None, None)
    assert config.verbose is False


def test_a_call_compiled_with_dynamic_is_not_seen_elsewhere(patched: None) -> None:
    # A CUDA build without a GPU crashes unless the first compile is the main thread's.
    torch.compile(lambda y: y + 1, backend="eager")(torch.ones(1))
    inside, leave = threading.Event(), threading.Event()

    def wait(gm: Any, example_inputs: Any) -> Any:
        seen.append(config.assume_static_by_default)
        inside.set()
        assert leave.wait(WAIT_S)
        return gm

    seen: list[bool] = []
    compiled = torch.compile(lambda y: y.sin(), backend=wait, dynamic=True)
    before = config.assume_static_by_default
    worker = Worker(lambda: compiled(torch.ones(3)))
    assert inside.wait(WAIT_S)
    there = config.assume_static_by_default
    leave.set()
    torch.testing.assert_close(worker.get(), torch.ones(3).sin())
    assert (seen, there) == ([False], before)


def test_settings_of_a_class_and_aliases_are_blocks_own_too(patched: None) -> None:
    def look() -> Any:
        return inductor_config.triton.cudagraphs, config.capture_scalar_outputs

    before = look()
    with inductor_config.patch({"triton.cudagraphs": not before[0]}):
        assert everywhere(look) == ((not before[0], before[1]), before)
    compiler = getattr(torch.compiler, "config", None)
    if "capture_scalar_outputs" in vars(compiler).get("_config", {}):  # from 2.10: an alias
        with compiler.patch(capture_scalar_outputs=not before[1]):
            assert everywhere(look) == ((before[0], not before[1]), before)
    assert everywhere(look) == (before, before)


def test_mock_patch_still_works(patched: None) -> None:
    before = limit()
    with mock.patch.object(config, LIMIT, 5):
        assert everywhere() == (5, 5)
    assert everywhere() == (before, before)


def test_a_hash_of_a_block_does_not_stay(patched: None) -> None:
    before = inductor_config.get_hash()
    with inductor_config.patch(epilogue_fusion=False):
        assert inductor_config.get_hash() != before
    assert inductor_config.get_hash() == before
    with inductor_config.patch(epilogue_fusion=False):
        inductor_config.get_hash()
    torchcompat.unapply()
    assert inductor_config.get_hash() == before


def test_blocks_under_way_when_the_patch_comes_or_goes() -> None:
    before = limit()
    with config.patch({LIMIT: 5}):
        torchcompat.apply(only=["config_patch_leak"])
        assert everywhere() == (5, 5)
    assert everywhere() == (before, before)
    with config.patch({LIMIT: 5}):
        torchcompat.unapply()
    assert everywhere() == (before, before)
    with torchcompat.applied(only=["config_patch_leak"]):
        assert everywhere() == (before, before)


class Deep(torch.autograd.Function):
    """A backward that runs another backward inside, `depth` times. The engine gives the one that is
    60 levels down to a thread of its own."""

    seen: list[tuple[int, int]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        Deep.seen.append((threading.get_ident(), limit()))
        if ctx.depth:
            y = torch.ones(1, requires_grad=True)
            with torch.enable_grad():
                Deep.apply(y, ctx.depth - 1).backward()  # type: ignore[no-untyped-call]
        return grads[0], None


def deep_backward() -> set[int]:
    """The limits that a backward sees which goes on in threads of the engine."""
    Deep.seen = []
    x = torch.ones(1, requires_grad=True)
    Deep.apply(x, 70).backward()  # type: ignore[no-untyped-call]
    assert len({ident for ident, _ in Deep.seen}) > 1
    return {seen for _, seen in Deep.seen}


def test_autograd_threads_have_the_values_of_the_backward_they_work_for(patched: None) -> None:
    before = limit()
    with config.patch({LIMIT: 5}):
        assert deep_backward() == {5}
    assert deep_backward() == {before}
    inside = threading.Event()
    leave = threading.Event()

    def block() -> set[int]:
        with config.patch({LIMIT: 6}):
            inside.set()
            assert leave.wait(WAIT_S)
            return deep_backward()

    worker = Worker(block)
    assert inside.wait(WAIT_S)
    assert deep_backward() == {before}
    leave.set()
    assert worker.get() == {6}
    assert everywhere() == (before, before)
