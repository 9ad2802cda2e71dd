"""Each thread has its own names for guards; the program shows the fault itself."""

from __future__ import annotations

from typing import Any

import pytest
from interleaving import Worker

import torchcompat

guards: Any = pytest.importorskip("torch._dynamo.guards")


@pytest.fixture
def names() -> Any:
    """`_get_closure_vars`, patched."""
    with torchcompat.applied(only=["guard_scope"]) as report:
        if report["guard_scope"].state.value != "applied":
            pytest.skip(report["guard_scope"].reason)
        yield guards._get_closure_vars


def test_a_thread_keeps_its_dictionary_and_shares_it_with_none(names: Any) -> None:
    mine = names()
    mine["spare"] = 1
    assert names() is mine
    theirs = Worker(names).get()
    assert "spare" not in theirs
    assert {k: v for k, v in mine.items() if k != "spare"} == theirs
    del mine["spare"]


def test_taken_away_torch_has_its_own_again() -> None:
    before = guards._get_closure_vars()
    with torchcompat.applied(only=["guard_scope"]):
        pass
    assert guards._get_closure_vars() is before
