from __future__ import annotations

import itertools

import pytest

from dflash.block_policy import BlockPolicy

COSTS = {1: 1.0, 2: 1.3, 4: 1.6, 8: 2.2, 16: 3.4}


def decode(policy, lengths, tokens):
    """Seconds and widths of writing so many tokens; `lengths` are full blocks' accept lengths."""
    seconds, written, widths = 0.0, 0, []
    while written < tokens:
        width = policy.next()
        got = min(width, next(lengths)) if width > 1 else 1
        policy.record(width, [got], COSTS[width])
        seconds, written = seconds + COSTS[width], written + got
        widths.append(width)
    return seconds, widths


def test_without_adaptation_the_width_is_the_block():
    policy = BlockPolicy(16, adaptive=False)
    assert policy.widths == (16,)
    decode(policy, itertools.repeat(1), 50)
    assert policy.next() == 16
    assert BlockPolicy(1, adaptive=True).next() == 1


def test_widths_are_halves():
    assert BlockPolicy(16, adaptive=True).widths == (1, 2, 4, 8, 16)
    assert BlockPolicy(10, adaptive=True).widths == (1, 2, 5, 10)
    assert BlockPolicy(2, adaptive=True).widths == (1, 2)


def test_a_drafter_that_never_hits_costs_little_over_plain_decoding():
    policy = BlockPolicy(16, adaptive=True)
    seconds, widths = decode(policy, itertools.repeat(1), 2000)
    assert seconds < 1.05 * 2000
    assert widths[-1] == 1 or widths.count(1) > 1900
    assert 1 in widths[:5]


def test_a_good_drafter_keeps_the_whole_block():
    policy = BlockPolicy(16, adaptive=True)
    seconds, widths = decode(policy, itertools.repeat(16), 2000)
    assert set(widths[4:]) == {16}
    assert seconds < 1.02 * 2000 / 16 * COSTS[16] + 2


@pytest.mark.parametrize(("length", "best"), [(2, 2), (4, 4), (8, 8)])
def test_slots_that_never_hit_are_not_drafted(length, best):
    policy = BlockPolicy(16, adaptive=True)
    _, widths = decode(policy, itertools.repeat(length), 800)
    assert widths[-1] == best
    assert widths.count(best) > 0.8 * len(widths)


def test_a_drafter_that_becomes_good_is_found_again():
    policy = BlockPolicy(16, adaptive=True)
    decode(policy, itertools.repeat(1), 600)
    _, widths = decode(policy, itertools.repeat(12), 1600)
    assert sum(width > 1 for width in widths[-20:]) >= 19


def test_the_first_round_of_a_width_is_not_timed():
    policy = BlockPolicy(4, adaptive=True)
    assert policy.next() == 4
    policy.record(4, [4], 100.0)
    policy.record(4, [4], 1.5)
    assert policy.next() == 1
    policy.record(1, [1], 50.0)
    policy.record(1, [1], 1.0)
    assert policy.next() == 4
    assert policy.rate(1) == 1.0
    assert policy.expected(4) == pytest.approx(4.0)
