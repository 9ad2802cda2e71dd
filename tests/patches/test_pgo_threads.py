from __future__ import annotations

from typing import Any

import pytest
import torch
from interleaving import Worker


class Watch:
    """A backend that notes for each graph whether it is dynamic."""

    def __init__(self) -> None:
        self.dynamic: list[bool] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.dynamic.append(not all(isinstance(v, torch.Tensor) for v in inputs))
        return graph.forward

    def compile(self, function: Any) -> Any:
        return torch.compile(function, backend=self)


def in_thread(function: Any, *sizes: int) -> None:
    def calls() -> None:
        for size in sizes:
            y = torch.randn(size)
            torch.testing.assert_close(function(y), y.sin())

    Worker(calls).get()


def test_a_size_for_each_thread_stays_static(patched: None) -> None:
    watch = Watch()
    function = watch.compile(lambda y: y.sin())
    for size in (8, 16, 24, 32):
        in_thread(function, size)
    assert watch.dynamic == [False] * 4


def test_threads_that_come_and_go_get_one_dynamic_graph(patched: None) -> None:
    watch = Watch()
    function = watch.compile(lambda y: y.sin())
    for size in range(8, 30):
        in_thread(function, size)
    assert watch.dynamic == [False] * 4 + [True]


@pytest.mark.parametrize("others", [0, 1])
def test_sizes_that_vary_in_one_thread_are_dynamic(patched: None, others: int) -> None:
    watch = Watch()
    function = watch.compile(lambda y: y.sin())
    for number in range(others):
        in_thread(function, 100 + number)
    in_thread(function, 8, 16, 24, 40)
    assert watch.dynamic == [False] * (others + 1) + [True]


def test_functions_do_not_share_what_threads_have_seen(patched: None) -> None:
    watch = Watch()
    first = watch.compile(lambda y: y.sin())
    second = watch.compile(lambda y: (y + 0).sin())
    in_thread(first, 8, 16)
    in_thread(second, 8)
    assert watch.dynamic == [False, True, False]


def test_a_reset_forgets(patched: None) -> None:
    watch = Watch()
    function = watch.compile(lambda y: y.sin())
    in_thread(function, 8, 16)
    torch._dynamo.reset()
    in_thread(function, 24)
    assert watch.dynamic == [False, True, False]
