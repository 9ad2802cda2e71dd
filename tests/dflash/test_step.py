"""The sums of a batch, against the same batch taken apart and against a loop over slots."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dflash.anchors import sample_anchors
from dflash.drafter import Drafter, DrafterConfig
from dflash.feature_store import Batch
from dflash.step import Frozen, LossTerms, SumLayout, draft_sums

VOCAB, HIDDEN, BLOCK, LENGTH = 23, 16, 4, 14
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    num_target_layers=8,
    target_layer_ids=(1, 4),
    block_size=BLOCK,
    mask_token_id=22,
)
TERMS = LossTerms(
    num_anchors=5, gamma=2.0, ce=1.0, kl=0.5, temperature=2.0, chunk=None, autocast=False
)


def make_drafter():
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(torch.Generator().manual_seed(5))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return drafter


def make_frozen(rows=None):
    generator = torch.Generator().manual_seed(6)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    return Frozen(embed, torch.randn(VOCAB, HIDDEN, generator=generator), rows)


def make_batch(lengths=(14, 9, 0), seed=1):
    generator = torch.Generator().manual_seed(2)
    rows = len(lengths)
    mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, 3:length] = True
    return Batch(
        number=0,
        anchor_seed=seed,
        ids_bS=torch.randint(0, VOCAB - 1, (rows, LENGTH), generator=generator),
        loss_mask_bS=mask,
        lengths_b=torch.tensor(lengths),
        context_bSF=torch.randn(rows, LENGTH, 2 * HIDDEN, generator=generator),
        last_bSH=torch.randn(rows, LENGTH, HIDDEN, generator=generator),
    )


def anchors_of(batch):
    generator = torch.Generator().manual_seed(batch.anchor_seed)
    return sample_anchors(batch.loss_mask_bS, TERMS.num_anchors, generator, lengths=batch.lengths_b)


@torch.no_grad()
def reference_sums(drafter, frozen, batch):
    """One block at a time through the decode-time path, one slot at a time in the sums."""
    anchors, keep = anchors_of(batch)
    sums = torch.zeros(SumLayout(BLOCK).size, dtype=torch.float64)
    rows = range(VOCAB) if frozen.rows_R is None else frozen.rows_R.tolist()
    for b in range(len(anchors)):
        length = int(batch.lengths_b[b])
        sums[SumLayout.TOKENS] += length
        for a in anchors[b][keep[b]].tolist():
            ids = [int(batch.ids_bS[b, a])] + [CONFIG.mask_token_id] * (BLOCK - 1)
            hidden = drafter.forward_cached(
                frozen.embed_VH[ids][None],
                batch.context_bSF[b, :a][None],
                torch.arange(a)[None],
                torch.arange(a, a + BLOCK)[None],
                drafter.new_cache(LENGTH + BLOCK),
            )[0]
            run, running = 1, True
            for k in range(1, BLOCK):
                if a + k >= length:
                    break
                logits = (hidden[k] @ frozen.head_VH.T)[list(rows)]
                teacher = (batch.last_bSH[b, a + k - 1] @ frozen.head_VH.T)[list(rows)]
                label = list(rows).index(int(batch.ids_bS[b, a + k]))
                weight = math.exp(-(k - 1) / TERMS.gamma)
                log_q = (logits / TERMS.temperature).log_softmax(0)
                log_p = (teacher / TERMS.temperature).log_softmax(0)
                kl = float((log_p.exp() * (log_p - log_q)).sum()) * TERMS.temperature**2
                sums[SumLayout.WEIGHT] += weight
                sums[SumLayout.CE] += -weight * float(logits.log_softmax(0)[label])
                sums[SumLayout.KL] += weight * kl
                hit = int(logits.argmax()) == label
                running = running and hit
                run += running
                sums[SumLayout(BLOCK).hits][k - 1] += hit
                sums[SumLayout(BLOCK).counts][k - 1] += 1
            sums[SumLayout.BLOCKS] += 1
            sums[SumLayout.ACCEPTED] += run
    return sums


def all_rows_but_one(batch):
    unused = sorted(set(range(VOCAB)) - set(batch.ids_bS.flatten().tolist()))
    return torch.tensor([token for token in range(VOCAB) if token != unused[0]])


@pytest.mark.parametrize("restricted", [False, True])
def test_sums_equal_a_loop_over_slots_decoded_one_block_at_a_time(restricted):
    batch, drafter = make_batch(), make_drafter()
    frozen = make_frozen(all_rows_but_one(batch) if restricted else None)
    numerator, sums = draft_sums(drafter, frozen, batch, TERMS)
    expected = reference_sums(drafter, frozen, batch)
    assert torch.allclose(sums, expected, rtol=2e-5)
    total = TERMS.ce * expected[SumLayout.CE] + TERMS.kl * expected[SumLayout.KL]
    assert numerator.item() == pytest.approx(float(total), rel=2e-5)
    hits, counts = sums[SumLayout(BLOCK).hits], sums[SumLayout(BLOCK).counts]
    assert (hits <= counts).all()
    assert counts.sum() > 0


def test_the_same_seed_gives_the_same_bits_and_another_one_other_anchors():
    drafter, frozen = make_drafter(), make_frozen()
    first = draft_sums(drafter, frozen, make_batch(), TERMS)
    torch.rand(100)  # the process's own generator is no part of it
    again = draft_sums(drafter, frozen, make_batch(), TERMS)
    other = draft_sums(drafter, frozen, make_batch(seed=3), TERMS)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_a_batch_without_any_anchor_adds_nothing_and_has_a_gradient():
    drafter = make_drafter()
    numerator, sums = draft_sums(drafter, make_frozen(), make_batch((0, 4, 2)), TERMS)
    numerator.backward()
    assert numerator.item() == 0
    assert sums[SumLayout.WEIGHT] == 0
    assert sums[SumLayout.TOKENS] == 6
    for parameter in drafter.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


def test_the_gradient_is_that_of_the_numerator():
    drafter, frozen, batch = make_drafter(), make_frozen(), make_batch()
    draft_sums(drafter, frozen, batch, TERMS)[0].backward()
    slopes = [parameter.grad.clone() for parameter in drafter.parameters()]
    square = sum(float(slope.square().sum()) for slope in slopes)
    step = 1e-3 / square**0.5
    values = []
    for factor in (step, -2 * step):  # along the gradient, where the change is largest
        with torch.no_grad():
            for parameter, slope in zip(drafter.parameters(), slopes, strict=True):
                parameter += factor * slope
            values.append(draft_sums(drafter, frozen, batch, TERMS)[0].item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(square, rel=0.02)


def test_autocast_changes_bits_only():
    drafter, frozen, batch = make_drafter(), make_frozen(), make_batch()
    exact = draft_sums(drafter, frozen, batch, TERMS)
    rough = draft_sums(drafter, frozen, batch, dataclasses.replace(TERMS, autocast=True))
    assert not torch.equal(exact[0], rough[0])
    assert rough[0].item() == pytest.approx(exact[0].item(), rel=0.05)
    assert rough[0].dtype == torch.float32
