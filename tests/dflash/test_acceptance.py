from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from dflash.acceptance import (
    AcceptanceStats,
    accepted_length,
    joint_acceptance_lengths,
    slot_hits,
)
from dflash.errors import ConfigError


def test_accepted_length_of_every_short_pair():
    for drafted in itertools.product(range(2), repeat=3):
        for wanted in itertools.product(range(2), repeat=4):
            want = 0
            while want < 3 and drafted[want] == wanted[want]:
                want += 1
            assert accepted_length(drafted, wanted) == want
            assert accepted_length(torch.tensor(drafted), torch.tensor(wanted)) == want


def test_teacher_forced_counts_equal_the_loops():
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(3, 5, 4, generator=generator) < 0.6
    weights = torch.rand(3, 5, 4, generator=generator)
    weights[torch.rand(3, 5, 4, generator=generator) < 0.2] = 0.0
    weights[:, :, 0] = 0.0
    weights[0, 0] = 0.0
    hits, counts, lengths = [0] * 4, [0] * 4, []
    for b in range(3):
        for j in range(5):
            run, running = 1, True
            for k in range(1, 4):
                counted = float(weights[b, j, k]) > 0
                right = counted and bool(correct[b, j, k])
                hits[k] += right
                counts[k] += counted
                running = running and right
                run += running
            if (weights[b, j] > 0).any():
                lengths.append(run)
    got_hits, got_counts = slot_hits(correct, weights)
    assert (got_hits.tolist(), got_counts.tolist()) == (hits, counts)
    assert joint_acceptance_lengths(correct, weights).tolist() == lengths
    assert 0 < len(lengths) < 15


def test_macro_and_pooled_differ_as_they_should():
    stats = AcceptanceStats(4)
    stats.add([4, 4])
    stats.add([1, 1, 1, 1, 1, 1])
    stats.add([])
    assert stats.responses == 2
    assert stats.macro == pytest.approx((4 + 1) / 2)
    assert stats.pooled == pytest.approx((8 + 6) / 8)
    assert stats.per_position == [2 / 8, 2 / 8, 2 / 8]
    assert stats.pooled == pytest.approx(1 + sum(stats.per_position))


def test_merge_is_adding_everything_to_one():
    one, left, right = AcceptanceStats(3), AcceptanceStats(3), AcceptanceStats(3)
    for stats, rounds in ((left, [1, 3]), (left, [2]), (right, [3, 3, 1])):
        stats.add(rounds)
        one.add(rounds)
    left.merge(right)
    assert left == one
    assert right.responses == 1


def test_nothing_decoded_is_nan():
    stats = AcceptanceStats(3)
    assert math.isnan(stats.macro)
    assert math.isnan(stats.pooled)
    assert all(math.isnan(p) for p in stats.per_position)


def test_as_dict_is_json_and_complete():
    stats = AcceptanceStats(3)
    stats.add([1, 2, 3, 3])
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["acceptance_length_macro"] == 2.25
    assert found["per_position"] == [0.75, 0.5]
    assert found["rounds_of_length"] == [1, 1, 2]


def test_impossible_counts_are_refused():
    with pytest.raises(ConfigError, match="acceptance length 5"):
        AcceptanceStats(4).add([1, 5])
    with pytest.raises(ConfigError, match="block_size is 0"):
        AcceptanceStats(0)
    with pytest.raises(ConfigError, match="2 acceptance counts"):
        AcceptanceStats(3, [1, 1])
    with pytest.raises(ConfigError, match="cannot be merged"):
        AcceptanceStats(3).merge(AcceptanceStats(4))
