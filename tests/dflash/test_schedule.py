from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from dflash.schedule import (
    Schedule,
    bucket_of,
    choose_buckets,
    feature_groups,
    learning_rate,
    stable_seed,
)


def make(lengths, **changes):
    settings = {
        "buckets": choose_buckets(lengths, multiple=16, count=2),
        "seed": 3,
        "batch": 2,
        "drafters": 2,
        "accumulate": 1,
        "epochs": 2.0,
        "steps": 0,
    } | changes
    return Schedule(lengths, **settings)


def some_lengths(count, seed=0):
    rng = random.Random(seed)
    return [rng.randint(5, 120) for _ in range(count)]


def test_seeds_are_stable_and_distinct():
    assert stable_seed(0, "anchors", 5) == stable_seed(0, "anchors", 5)
    assert stable_seed(0, "anchors", 5) == 5909952988927974015  # same in every process for ever
    seeds = {stable_seed(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_buckets_waste_no_more_than_the_best_of_all_choices(count):
    lengths = some_lengths(25, seed=count)
    buckets = choose_buckets(lengths, multiple=8, count=count)
    sizes = sorted({-(-length // 8) * 8 for length in lengths})

    def padded(choice):
        return sum(min(size for size in choice if size >= length) for length in lengths)

    choices = [
        (*inner, sizes[-1])
        for k in range(min(count, len(sizes)))
        for inner in itertools.combinations(sizes[:-1], k)
    ]
    assert padded(buckets) == min(padded(choice) for choice in choices)
    assert len(buckets) <= count
    assert list(buckets) == sorted(buckets)
    assert all(bucket % 8 == 0 for bucket in buckets)


def test_feature_groups_hold_everything_once_and_like_lengths_together():
    lengths = some_lengths(23)
    groups = feature_groups(lengths, 4)
    assert sorted(i for group in groups for i in group) == list(range(23))
    assert [len(group) for group in groups] == [4] * 5 + [3]
    in_order = [lengths[i] for group in groups for i in group]
    assert in_order == sorted(in_order)


@pytest.mark.parametrize(("count", "drafters", "batch"), [(1, 2, 2), (7, 1, 4), (25, 3, 2)])
def test_each_epoch_visits_each_sequence_once(count, drafters, batch):
    lengths = some_lengths(count)
    plan = make(lengths, drafters=drafters, batch=batch, epochs=3.0)
    per_epoch = plan.rounds_per_epoch * drafters
    orders = []
    for epoch in range(3):
        batches = [plan.microbatch(epoch * per_epoch + i) for i in range(per_epoch)]
        visits = Counter(i for micro in batches for i in micro.indices)
        assert visits == Counter(range(count))
        orders.append([micro.indices for micro in batches])
    if count > 7:
        assert orders[0] != orders[1] != orders[2]


def test_a_round_is_of_one_length_that_holds_its_sequences():
    lengths = some_lengths(30)
    plan = make(lengths)
    waste_free = 0
    for start in range(0, plan.total, plan.drafters):
        round_ = [plan.microbatch(start + rank) for rank in range(plan.drafters)]
        assert len({micro.length for micro in round_}) == 1
        for micro in round_:
            assert len(micro.indices) <= 2
            assert all(lengths[i] <= micro.length for i in micro.indices)
            waste_free += all(
                bucket_of(lengths[i], plan.buckets) == micro.length for i in micro.indices
            )
    assert waste_free > plan.total / 2


def test_a_microbatch_depends_on_its_number_alone():
    lengths = some_lengths(19)
    forwards, backwards = make(lengths), make(lengths)
    numbers = range(forwards.total)
    first = {n: forwards.microbatch(n) for n in numbers}
    second = {n: backwards.microbatch(n) for n in reversed(numbers)}
    assert first == second
    assert len({micro.anchor_seed for micro in first.values()}) == len(first)
    assert make(lengths, seed=4).microbatch(0) != first[0]


def test_steps_come_from_the_epochs_or_as_asked():
    lengths = [20] * 10
    assert make(lengths, epochs=4.0).steps == 12  # three rounds an epoch
    assert make(lengths, epochs=4.0, accumulate=5).steps == 3
    assert make(lengths, steps=7).steps == 7
    assert make(lengths, epochs=0.01).steps == 1
    assert make(lengths, steps=7, accumulate=3).total == 7 * 3 * 2


def test_fingerprint_tells_other_batches_apart():
    lengths = some_lengths(12)
    base = make(lengths).fingerprint
    assert make(list(lengths)).fingerprint == base
    changes = ({"seed": 9}, {"batch": 3}, {"drafters": 3}, {"accumulate": 2}, {"steps": 5})
    others = [make(lengths, **change).fingerprint for change in changes]
    others.append(make([*lengths[:-1], lengths[-1] - 1]).fingerprint)
    assert len({base, *others}) == 7


def test_learning_rate_rises_to_the_peak_and_falls_to_the_minimum():
    def rate(step, schedule="cosine"):
        return learning_rate(step, 100, peak=2.0, warmup=0.1, schedule=schedule, minimum=0.05)

    rising = [rate(step) for step in range(10)]
    assert rising == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rate(10) == pytest.approx(2.0)
    falling = [rate(step) for step in range(10, 100)]
    assert falling == sorted(falling, reverse=True)
    assert rate(99) == pytest.approx(0.1)
    assert rate(99, "linear") == pytest.approx(0.1)
    assert rate(50, "linear") == pytest.approx(2.0 * (0.05 + 0.95 * (1 - 40 / 89)))
    assert rate(99, "constant") == 2.0
    # degenerate lengths
    assert learning_rate(0, 1, peak=1.0, warmup=0.0, schedule="cosine", minimum=0.0) == 1.0
    assert learning_rate(0, 1, peak=1.0, warmup=1.0, schedule="cosine", minimum=0.0) == 1.0
