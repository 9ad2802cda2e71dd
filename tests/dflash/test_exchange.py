from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from dflash.exchange import GradientExchange
from dflash.workers import Stopped, StopSignal


def run_all(exchange, grads, sums, delays=None):
    errors = []

    def work(rank):
        try:
            if delays:
                time.sleep(delays[rank])
            exchange.reduce(rank, grads[rank], sums[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(len(grads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    return errors


def make(drafters, length=1003, seed=0):
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(length, generator=generator) * 10.0**r for r in range(drafters)]
    sums = [torch.randn(5, generator=generator).double() for _ in range(drafters)]
    return grads, sums


@pytest.mark.parametrize("drafters", [1, 2, 3, 5])
def test_everybody_gets_the_sum_in_the_order_of_the_ranks(drafters):
    grads, sums = make(drafters)
    expected, expected_sums = grads[0].clone(), sums[0].clone()
    for rank in range(1, drafters):  # float32 addition: another order would give other bits
        expected = expected + grads[rank]
        expected_sums = expected_sums + sums[rank]
    assert run_all(GradientExchange(drafters, StopSignal()), grads, sums) == []
    for rank in range(drafters):
        assert torch.equal(grads[rank], expected)
        assert torch.equal(sums[rank], expected_sums)


def test_same_bits_whatever_the_timing_over_many_rounds():
    results = []
    for trial in range(6):
        exchange = GradientExchange(3, StopSignal())
        grads, sums = make(3)
        rng = random.Random(trial)
        for _ in range(5):
            delays = [rng.choice([0.0, 0.0, 0.003]) for _ in range(3)]
            assert run_all(exchange, grads, sums, delays) == []
            for rank, grad in enumerate(grads):
                grad.mul_(0.25).add_(rank)
        results.append([grad.clone() for grad in grads])
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            assert torch.equal(mine, first)


def test_gradients_shorter_than_the_number_of_drafters():
    grads, sums = make(3, length=2)
    expected = grads[0] + grads[1] + grads[2]
    assert run_all(GradientExchange(3, StopSignal()), grads, sums) == []
    assert torch.equal(grads[2], expected)


def test_a_drafter_that_never_comes_does_not_hold_the_others_after_a_stop():
    stop = StopSignal()
    exchange = GradientExchange(2, stop)
    grads, sums = make(2)
    before = grads[0].clone()
    caught = []

    def work():
        try:
            exchange.reduce(0, grads[0], sums[0])
        except Stopped as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert torch.equal(grads[0], before)
