from __future__ import annotations

import pytest
import torch

from dflash.anchors import sample_anchors, valid_anchors
from dflash.errors import ConfigError


def valid_by_loops(loss_mask, lengths):
    return [
        [a for a in range(len(row) - 1) if row[a] and row[a + 1] and a + 1 < length]
        for row, length in zip(loss_mask.tolist(), lengths.tolist(), strict=True)
    ]


def random_case(seed, batch=5, length=23):
    generator = torch.Generator().manual_seed(seed)
    loss_mask = torch.rand(batch, length, generator=generator) < 0.6
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    return loss_mask, lengths


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 4, 40])
def test_anchors_are_valid_different_sorted_and_as_many_as_there_are(seed, count):
    loss_mask, lengths = random_case(seed)
    anchors, keep = sample_anchors(
        loss_mask, count, torch.Generator().manual_seed(seed), lengths=lengths
    )
    assert anchors.shape == keep.shape == (5, count)
    assert anchors.dtype == torch.int64
    for row, kept, allowed in zip(
        anchors.tolist(), keep.tolist(), valid_by_loops(loss_mask, lengths), strict=True
    ):
        chosen = [a for a, k in zip(row, kept, strict=True) if k]
        assert len(chosen) == min(count, len(allowed))
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(allowed)
        assert row == sorted(row)
        # Dummies come last and lie on a real position.
        assert kept == sorted(kept, reverse=True)
        assert set(row) - set(chosen) <= {0, *chosen}


def test_valid_anchors_equals_the_loops():
    loss_mask, lengths = random_case(99, batch=20)
    found = [row.nonzero().flatten().tolist() for row in valid_anchors(loss_mask, lengths)]
    assert found == valid_by_loops(loss_mask, lengths)


def test_choice_is_uniform():
    loss_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0]]).bool()
    counts = torch.zeros(7)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        anchors, _ = sample_anchors(loss_mask, 2, generator, lengths=torch.tensor([7]))
        counts[anchors[0]] += 1
    # Valid: 1, 2, 3, 4, each with probability one half; 1000 +- 5 sigma.
    assert counts[[0, 5, 6]].sum() == 0
    assert ((counts[1:5] - 1000).abs() < 115).all()


def test_only_the_given_generator_is_used():
    loss_mask, lengths = random_case(3)
    before = torch.random.get_rng_state()
    first = sample_anchors(loss_mask, 4, torch.Generator().manual_seed(5), lengths=lengths)
    torch.manual_seed(12345)
    second = sample_anchors(loss_mask, 4, torch.Generator().manual_seed(5), lengths=lengths)
    torch.random.set_rng_state(before)
    assert torch.equal(first[0], second[0])


def test_sequence_without_anchor_gives_dummies_at_zero():
    anchors, keep = sample_anchors(
        torch.zeros(1, 9, dtype=torch.bool), 3, torch.Generator(), lengths=torch.tensor([9])
    )
    assert anchors.tolist() == [[0, 0, 0]]
    assert not keep.any()


def test_no_anchors_asked_for():
    with pytest.raises(ConfigError, match="num_anchors is 0"):
        sample_anchors(torch.ones(1, 9), 0, torch.Generator(), lengths=torch.tensor([9]))
