"""What settings mean in threads, on every torch: `config_patch_leak` sees to it up to 2.11."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Worker
from torch._dynamo import config
from torch._inductor import config as inductor_config

import torchcompat

pytestmark = pytest.mark.skipif(
    not hasattr(config, "recompile_limit"), reason="the limit has another name in this torch"
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = config.recompile_limit, inductor_config.max_autotune
    yield
    config.recompile_limit, inductor_config.max_autotune = before


def limit() -> int:
    return int(config.recompile_limit)


class Patched:
    """A thread inside `config.patch(recompile_limit=…)`, until it is let go."""

    def __init__(self, value: int) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.value = value
        self.worker = Worker(self.run)
        assert self.inside.wait(WAIT_S)

    def run(self) -> tuple[int, int]:
        with config.patch(recompile_limit=self.value):
            self.inside.set()
            assert self.leave.wait(WAIT_S)
            during = limit()
        return during, limit()

    def end(self) -> tuple[int, int]:
        self.leave.set()
        found: tuple[int, int] = self.worker.get()
        return found


def test_an_assignment_in_any_thread_is_for_all(patched: None) -> None:
    config.recompile_limit = 21
    assert Worker(limit).get() == 21

    def assign() -> None:
        config.recompile_limit = 22

    Worker(assign).get()
    assert limit() == Worker(limit).get() == 22
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(limit).result() == 22
        config.recompile_limit = 23
        assert pool.submit(limit).result() == 23


def test_what_was_assigned_before_is_for_all_too() -> None:
    config.recompile_limit = 24
    with torchcompat.applied():
        assert Worker(limit).get() == 24
    assert limit() == 24


def test_a_patch_is_its_threads_own(patched: None) -> None:
    config.recompile_limit = 21
    first, second = Patched(5), Patched(6)
    assert limit() == Worker(limit).get() == 21
    config.recompile_limit = 22  # reaches them when their patches end
    assert first.end() == (5, 22)
    assert second.end() == (6, 22)


def test_after_a_patch_assignments_of_others_are_seen_again(patched: None) -> None:
    with config.patch(recompile_limit=5):
        with config.patch(recompile_limit=6):
            assert limit() == 6
        assert limit() == 5
        config.recompile_limit = 7  # inside: own, until the patch ends
        assert limit() == 7
        assert Worker(limit).get() != 7

    def assign() -> None:
        config.recompile_limit = 25

    Worker(assign).get()
    assert limit() == 25


def test_a_patch_that_fails_leaves_nothing(patched: None) -> None:
    before = limit()
    with pytest.raises(AttributeError), config.patch({"recompile_limit": 5, "no_such": 1}):
        pass
    with pytest.raises(ZeroDivisionError), config.patch(recompile_limit=5):
        raise ZeroDivisionError
    assert limit() == before
    config.recompile_limit = 26
    assert Worker(limit).get() == 26


def test_a_decorated_function_and_a_closure_patcher(patched: None) -> None:
    @config.patch(recompile_limit=5)
    def work() -> tuple[int, int]:
        return limit(), int(Worker(limit).get())

    before = limit()
    assert work() == (5, before)
    change = config._make_closure_patcher(recompile_limit=9)
    revert = change()
    assert (limit(), Worker(limit).get()) == (9, before)
    revert()
    config.recompile_limit = 27
    assert (limit(), Worker(limit).get()) == (27, 27)


def test_tasks_take_a_patch_with_them(patched: None) -> None:
    async def main() -> tuple[int, int]:
        with config.patch(recompile_limit=5):
            return await asyncio.to_thread(limit), int(Worker(limit).get())

    before = limit()
    assert asyncio.run(main()) == (5, before)


def test_hashes_and_snapshots_follow_the_values(patched: None) -> None:
    def snapshot() -> tuple[bytes, Any]:
        copy = inductor_config.get_config_copy()
        return inductor_config.get_hash(), copy["max_autotune"]

    inductor_config.max_autotune = False
    with ThreadPoolExecutor(1) as pool:
        off = pool.submit(snapshot).result()
        assert off == snapshot()
        inductor_config.max_autotune = True
        on = pool.submit(snapshot).result()
        assert on == snapshot()
        assert on[0] != off[0]
        assert (off[1], on[1]) == (False, True)
        with inductor_config.patch(max_autotune=False):
            assert snapshot() == off
            assert pool.submit(snapshot).result() == on


def test_saved_and_loaded(patched: None) -> None:
    config.recompile_limit = 28
    saved = config.save_config()
    assert pickle.loads(saved)
    config.recompile_limit = 29
    config.load_config(saved)
    assert limit() == Worker(limit).get() == 28


def test_a_module_installed_later_has_it_too(
    patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchcompat_test_config.py").write_text(
        "import sys\n"
        "from torch.utils._config_module import install_config_module\n"
        "setting: int = 1\n"
        "install_config_module(sys.modules[__name__])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    later: Any = importlib.import_module("torchcompat_test_config")
    later.setting = 4
    assert Worker(lambda: later.setting).get() == 4
    with later.patch(setting=5):
        assert Worker(lambda: later.setting).get() == 4
    assert later.setting == 4


def test_afterwards_it_is_torchs_own_again() -> None:
    config.recompile_limit = 29
    kinds = {type(e.user_override) for e in vars(config)["_config"].values()}
    with torchcompat.applied():
        config.recompile_limit = 30
    assert {type(e.user_override) for e in vars(config)["_config"].values()} == kinds
    assert limit() == 30
    compiled = torch.compile(lambda y: y + 1, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
