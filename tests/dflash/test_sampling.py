"""Sampling with drafts has the target's distribution: shown by counting, with fixed seeds."""

from __future__ import annotations

import math

import pytest
import torch

from dflash.errors import GenerationError
from dflash.sampling import Sampling, draw, propose, verify

VOCAB, WIDTH, ROUNDS = 6, 3, 40_000


def chi_square(counts, expected):
    """Pearson's statistic over cells with an expectation; a count elsewhere is infinite."""
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def bound(cells):
    """Far above the 99.99 % point of a chi-square law (mean df, variance 2 df)."""
    freedom = cells - 1
    return freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_two_tokens_follow_the_targets_joint_distribution(proposal, top_p, top_k):
    """The target is a table: the distribution of token 2 depends on token 1. Rounds go on until
    two tokens are known, as decoding does, so accepted, replaced and bonus tokens all count."""
    sampling = Sampling(1.2, top_k, top_p, proposal)
    generator = torch.Generator().manual_seed(11)
    first_V = torch.randn(VOCAB, generator=generator)
    second_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    # The drafter knows the first token roughly, and the second one without knowing the first.
    drafts_2V = torch.stack([first_V, second_VV.mean(dim=0)])
    drafts_2V = drafts_2V + torch.randn(2, VOCAB, generator=generator) * 0.7
    uniforms = torch.rand(ROUNDS, WIDTH, 3, dtype=torch.float64, generator=generator)

    drafted, q = propose(drafts_2V.expand(ROUNDS, 2, VOCAB), sampling, uniforms[:, :2, 0])
    logits = torch.stack(
        [first_V.expand(ROUNDS, VOCAB), second_VV[drafted[:, 0]], second_VV[drafted[:, 1]]], dim=1
    )
    found = verify(logits, drafted, q, sampling, uniforms, torch.float32)
    one = found.tokens_bW[:, 0]
    # Where the first draft was replaced, the next round begins with the second token.
    again = found.accepted_b == 0
    drafted2, q2 = propose(drafts_2V[1:].expand(ROUNDS, 1, VOCAB), sampling, uniforms[:, 1:2, 0])
    logits2 = torch.stack([second_VV[one], second_VV[drafted2[:, 0]]], dim=1)
    second = verify(logits2, drafted2, q2, sampling, uniforms[:, 1:], torch.float32)
    two = torch.where(again, second.tokens_bW[:, 0], found.tokens_bW[:, 1])

    counts = torch.bincount(one * VOCAB + two, minlength=VOCAB**2).double()
    p = sampling.probabilities(first_V).unsqueeze(1) * sampling.probabilities(second_VV)
    expected = p.flatten() * ROUNDS
    assert chi_square(counts, expected) < bound(int((expected > 0).sum()))
    assert 100 < int(again.sum()) < ROUNDS - 1000  # all ways were taken


def test_the_count_notices_a_wrong_rule():
    """Drafts kept as they are, without rejection, are far outside of the bound."""
    sampling = Sampling(0.7, proposal="sampled")
    generator = torch.Generator().manual_seed(11)
    p_logits, q_logits = torch.randn(2, VOCAB, generator=generator)
    uniform = torch.rand(ROUNDS, dtype=torch.float64, generator=generator)
    drafted, _ = propose(q_logits.expand(ROUNDS, VOCAB), sampling, uniform)
    counts = torch.bincount(drafted, minlength=VOCAB).double()
    assert chi_square(counts, sampling.probabilities(p_logits) * ROUNDS) > 10 * bound(VOCAB)


def test_probabilities_by_hand():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    e = [math.exp(x / 2) for x in (0, 1, 2, 3)]
    plain = Sampling(2.0).probabilities(logits)
    torch.testing.assert_close(plain, torch.tensor(e, dtype=torch.float64) / sum(e))
    two = Sampling(2.0, top_k=2).probabilities(logits)
    assert two[:2].tolist() == [0, 0]
    torch.testing.assert_close(float(two[3] / two[2]), e[3] / e[2])
    # 3 alone has 0.455 of the mass, with 2 it is 0.731, with 1 0.898.
    for top_p, kept in ((0.4, 1), (0.46, 2), (0.74, 3), (0.9, 4)):
        found = Sampling(2.0, top_p=top_p).probabilities(logits)
        assert int((found > 0).sum()) == kept
        torch.testing.assert_close(float(found.sum()), 1.0)


def test_draw_never_gives_an_impossible_token():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.expand(5, 5), points).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_temperatures_that_are_none(value):
    with pytest.raises(GenerationError, match="temperature is"):
        Sampling(value)
    with pytest.raises(GenerationError, match="proposal is 'both'"):
        Sampling(1.0, proposal="both")
