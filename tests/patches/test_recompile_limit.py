"""What a user hears where a function has as many compiled versions as it may."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch import nn

import torchcompat
from torchcompat import RecompileLimitWarning
from torchcompat.config import in_force

LIMIT = 8
FailOnRecompileLimitHit = torch._dynamo.exc.FailOnRecompileLimitHit
FAIL = next(
    name
    for name in ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
    if hasattr(torch._dynamo.config, name)
)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(torch.ones(4))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", dynamic=False, **options)


def fill(f: Callable[..., Any], versions: int = LIMIT) -> None:
    for n in range(2, 2 + versions):
        f(torch.ones(n))


@contextmanager
def told() -> Iterator[list[warnings.WarningMessage]]:
    """Only ours: torch's own lines are in its log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    caught[:] = [w for w in caught if issubclass(w.category, RecompileLimitWarning)]


def test_one_warning_says_which_function_which_limit_and_what_to_do(patched: None) -> None:
    def scaled(y: torch.Tensor) -> torch.Tensor:
        return y * 3

    f = compiled(scaled)
    with told() as before:
        fill(f)
    assert before == []
    with told() as caught:
        for n in range(40, 44):
            torch.testing.assert_close(f(torch.ones(n)), torch.full((n,), 3.0))
    (warning,) = caught
    text = str(warning.message)
    line = scaled.__code__.co_firstlineno
    assert (Path(warning.filename).name, warning.lineno) == (Path(__file__).name, line)
    assert f"'scaled' ({scaled.__code__.co_filename}:{line})" in text
    assert f"{LIMIT} are there" in text
    assert "torch._dynamo.config." in text
    assert f"_limit is {LIMIT}" in text
    reason = text.split("Last guard that failed: ")[1].splitlines()[0]
    assert "size mismatch" in reason
    assert "expected 9, actual 40" in reason or "expected 2, actual 40" in reason
    assert "mark_dynamic" in text
    assert "TORCHCOMPAT_ON_RECOMPILE_LIMIT=error" in text


def test_threads_that_wait_for_the_same_compile_hear_it_once(patched: None) -> None:
    f = compiled(lambda y: y.sinh())
    fill(f)
    start = threading.Barrier(4)

    def call() -> None:
        start.wait(WAIT_S)
        f(torch.ones(50))

    # The limit over all holds for every thread alike; each looks for itself once it has the lock.
    with torch._dynamo.config.patch(accumulated_recompile_limit=LIMIT), told() as caught:
        for worker in [Worker(call) for _ in range(4)]:
            worker.get()
        f(torch.ones(51))
    assert len(caught) == 1


def test_calls_that_raise_under_fullgraph_are_explained_once(patched: None) -> None:
    f = compiled(lambda y: y.sign(), fullgraph=True)
    fill(f)
    with told() as caught:
        for n in (40, 40, 41):
            with pytest.raises(FailOnRecompileLimitHit, match=r"fullgraph|one_graph"):
                f(torch.ones(n))
    assert len(caught) == 1


def test_each_module_that_reaches_the_limit_is_named(patched: None) -> None:
    class Tall(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y + 1

    with told() as caught:
        fill(compiled(Tall()), LIMIT + 2)
    (warning,) = caught
    assert "'forward' of a " in str(warning.message)
    assert "Tall" in str(warning.message)


def test_the_limit_over_all_is_told_as_what_it_is(patched: None) -> None:
    f = compiled(lambda y: y.asinh())
    with torch._dynamo.config.patch(accumulated_recompile_limit=3), told() as caught:
        fill(f, 6)
    (warning,) = caught
    text = str(warning.message)
    assert "accumulated_" in text
    assert "3 are there" in text
    assert "_limit is 3" in text


def test_an_error_instead_comes_at_every_call_that_is_not_compiled() -> None:
    with torchcompat.applied(on_recompile_limit="error"), told() as caught:
        f = compiled(lambda y: y.acosh())
        fill(f)
        for _ in range(2):
            with pytest.raises(FailOnRecompileLimitHit, match=r"no more versions of '<lambda>' \("):
                f(torch.ones(60))
        f(torch.ones(3))  # has its version
    assert caught == []
    torch._dynamo.reset()


def test_the_error_comes_in_the_thread_whose_call_it_is() -> None:
    with torchcompat.applied(on_recompile_limit="error"):
        f = compiled(lambda y: y.atanh())
        fill(f)

        def too_many() -> None:
            fill(f, LIMIT + 1)

        # The main thread's versions fit this one too; the ninth shape is its own first.
        Worker(too_many).get()
        with pytest.raises(FailOnRecompileLimitHit):
            Worker(lambda: [f(torch.ones(n)) for n in range(70, 90)]).get()
    torch._dynamo.reset()


def test_torchs_own_setting_keeps_working_and_needs_no_second_word(patched: None) -> None:
    f = compiled(lambda y: y.erf())
    fill(f)
    with torch._dynamo.config.patch({FAIL: True}), told() as caught:
        with pytest.raises(FailOnRecompileLimitHit, match="ail"):
            f(torch.ones(60))
    assert caught == []


def test_a_warning_that_is_made_an_error_reaches_the_caller(patched: None) -> None:
    f = compiled(lambda y: y.erfc())
    fill(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecompileLimitWarning)
        with pytest.raises(RecompileLimitWarning, match="no more versions"):
            f(torch.ones(60))


def test_what_apply_is_told_holds_until_everything_is_unapplied() -> None:
    assert in_force().on_recompile_limit == "warn"
    try:
        torchcompat.apply(on_recompile_limit="error")
        torchcompat.apply()
        assert in_force().on_recompile_limit == "error"
        lines = torchcompat.status().settings.lines()
        assert "on_recompile_limit = error (on_recompile_limit=)" in lines
    finally:
        torchcompat.unapply()
    torchcompat.apply()
    torchcompat.unapply()
    assert in_force().on_recompile_limit == "warn"


def test_applied_gives_back_what_held_before() -> None:
    with torchcompat.applied():
        with torchcompat.applied(on_recompile_limit="error"):
            assert in_force().on_recompile_limit == "error"
        assert in_force().on_recompile_limit == "warn"


def test_another_value_is_refused_and_changes_nothing() -> None:
    with pytest.raises(torchcompat.ConfigError, match="on_recompile_limit= is 'raise'; it can be"):
        torchcompat.apply(on_recompile_limit="raise")  # type: ignore[arg-type]
    assert torchcompat.status().settings.on_recompile_limit == "warn"
