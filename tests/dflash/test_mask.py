from __future__ import annotations

import pytest
import torch

from dflash.mask import block_mask_dense, block_mask_flex, block_mask_mod, context_visible

S, B = 12, 3


def case(seed, with_docs):
    generator = torch.Generator().manual_seed(seed)
    batch, count = 3, 4
    anchors = torch.randint(0, S, (batch, count), generator=generator).sort(dim=1).values
    keep = torch.rand(batch, count, generator=generator) < 0.8
    lengths = torch.randint(1, S + 1, (batch,), generator=generator)
    docs = None
    if with_docs:
        docs = torch.randint(0, 2, (batch, S), generator=generator).cumsum(1) // 3
        docs[:, -2:] = -1
    return anchors, keep, lengths, docs


def mask_by_loops(anchors, keep, lengths, docs):
    batch, count = anchors.shape
    mask = torch.zeros(batch, 1, count * B, S + count * B, dtype=torch.bool)
    for b in range(batch):
        for j in range(count):
            anchor = int(anchors[b, j])
            for k in range(B):
                row = mask[b, 0, j * B + k]
                row[S + j * B : S + (j + 1) * B] = True
                if not keep[b, j]:
                    continue
                for kv in range(anchor):
                    same = docs is None or int(docs[b, kv]) == int(docs[b, anchor]) >= 0
                    if kv < int(lengths[b]) and same:
                        row[kv] = True
    return mask


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_dense_equals_the_loops(seed, with_docs):
    anchors, keep, lengths, docs = case(seed, with_docs)
    dense = block_mask_dense(anchors, keep, S, B, lengths, docs)
    assert torch.equal(dense, mask_by_loops(anchors, keep, lengths, docs))


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_flex_rule_equals_dense(seed, with_docs):
    from torch.nn.attention.flex_attention import create_mask

    anchors, keep, lengths, docs = case(seed, with_docs)
    count = anchors.shape[1] * B
    mod = block_mask_mod(anchors, keep, S, B, lengths, docs)
    flex = create_mask(mod, anchors.shape[0], 1, count, S + count, device="cpu")
    assert torch.equal(flex, block_mask_dense(anchors, keep, S, B, lengths, docs))


def test_block_mask_flex_covers_every_visible_key():
    anchors, keep, lengths, docs = case(1, True)
    made = block_mask_flex(anchors, keep, S, B, lengths, docs)
    assert made.shape == (3, 1, 12, S + 12)


def test_the_anchors_own_feature_is_hidden():
    seen = context_visible(
        torch.tensor([[5]]), torch.tensor([[True]]), S, torch.tensor([S])
    ).flatten()
    assert seen.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_every_query_sees_something():
    for seed in range(6):
        anchors, keep, lengths, docs = case(seed, True)
        assert block_mask_dense(anchors, keep, S, B, lengths, docs).any(dim=-1).all()
