from __future__ import annotations

import math

import pytest
import torch

from dflash.config import OptimSettings
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import CheckpointError
from dflash.feature_store import Batch
from dflash.replica import Replica, TrainingDiverged
from dflash.step import Frozen, LossTerms, SumLayout

VOCAB, HIDDEN = 11, 8
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    num_target_layers=6,
    target_layer_ids=(1, 2),
    block_size=3,
    mask_token_id=10,
)
TERMS = LossTerms(
    num_anchors=3, gamma=4.0, ce=2.0, kl=0.0, temperature=1.0, chunk=None, autocast=False
)


def make(**optim):
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(torch.Generator().manual_seed(11))
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    return Replica(drafter, Frozen(weight, weight), TERMS, OptimSettings(**optim))


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        number=0,
        anchor_seed=seed,
        ids_bS=torch.randint(0, VOCAB, (2, 9), generator=generator),
        loss_mask_bS=torch.ones(2, 9, dtype=torch.bool),
        lengths_b=torch.tensor([9, 7]),
        context_bSF=torch.randn(2, 9, 2 * HIDDEN, generator=generator),
        last_bSH=None,
        dropped=1,
    )


def step(replica, seed=0, lr=1e-2):
    replica.begin()
    replica.run(make_batch(seed))
    return replica.result(replica.update(lr))


def test_an_update_equals_adamw_on_the_mean_loss_of_the_plain_module():
    replica = make(clip=0.05, weight_decay=0.1)
    plain = Drafter(CONFIG)
    plain.load_state_dict(replica.drafter.state_dict())
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.999),
        fused=False,
        foreach=False,
    )
    from dflash.step import draft_sums

    for seed, lr in enumerate((1e-2, 3e-3, 2e-2)):
        result = step(replica, seed, lr)
        optimizer.zero_grad()
        numerator, sums = draft_sums(plain, replica._frozen, make_batch(seed), TERMS)
        loss = numerator / sums[SumLayout.WEIGHT].float()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, other in zip(replica.drafter.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)
    assert replica.completed == 3


def test_clip_zero_means_no_limit():
    free, clipped = make(clip=0.0), make(clip=1e-3)
    step(free), step(clipped)
    assert free.flat.grads_P.norm() > 0.01
    assert clipped.flat.grads_P.norm() == pytest.approx(1e-3, rel=1e-3)


def test_the_result_of_a_step():
    result = step(make())
    assert result.loss == pytest.approx(2.0 * result.ce)
    assert result.kl == 0
    assert result.dropped == 1
    assert result.tokens == 16
    assert result.blocks == 6
    assert len(result.accuracy) == 2
    assert all(0 <= share <= 1 for share in result.accuracy)
    assert 1 <= result.acceptance <= 3


def test_a_step_without_any_supervised_slot_changes_nothing_and_is_finite():
    replica = make()
    before = replica.flat.values_P.clone()
    replica.begin()
    result = replica.result(replica.update(1e-2))
    assert result.loss == 0
    assert math.isnan(result.acceptance)
    assert torch.equal(replica.flat.values_P, before)


def test_a_gradient_that_is_not_finite_is_an_error_that_names_the_way_out():
    replica = make()
    replica.begin()
    replica.run(make_batch())
    replica.flat.grads_P[3] = float("inf")
    norm = replica.update(1e-2)
    with pytest.raises(TrainingDiverged, match=r"step 1: .*lower optim\.lr"):
        replica.result(norm)


def test_state_goes_on_with_the_same_bits():
    whole, first = make(), make()
    for seed in range(3):
        step(whole, seed), step(first, seed)
    second = make()
    second.load({k: v.clone() for k, v in first.tensors().items()}, completed=first.completed)
    for seed in range(3, 6):
        assert step(whole, seed) == step(second, seed)
    assert torch.equal(whole.flat.values_P, second.flat.values_P)
    assert second.completed == 6


def test_state_before_the_first_step():
    first, second = make(), make()
    second.load(first.tensors(), completed=0)
    assert step(first) == step(second)


def test_foreign_state_is_refused():
    replica = make()
    tensors = replica.tensors()
    with pytest.raises(CheckpointError, match="the training state holds"):
        replica.load({"weights": tensors["weights"]}, completed=1)


def test_copied_weights_are_equal():
    first, second = make(), make()
    step(first)
    assert not torch.equal(first.flat.values_P, second.flat.values_P)
    second.copy_weights(first)
    assert torch.equal(first.flat.values_P, second.flat.values_P)
