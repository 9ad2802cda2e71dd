"""Drafters that were trained wrongly are told by what they predict.

Tiny drafters learn the answers of a tiny target by heart: with labels as DFlash has them, with
labels shifted by one, or from taps one layer off.
"""

from __future__ import annotations

import pytest
import torch
from format_files import fitting_drafter
from model_dir import make_model, make_tokenizer

from dflash import agreement
from dflash.agreement import Agreement, measure_agreement
from dflash.checkpoint_format import save_drafter
from dflash.decode import greedy
from dflash.geometry import block_positions, block_token_ids
from dflash.inspection import inspect_checkpoint
from dflash.mask import block_mask
from dflash.target import Target

TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return Target("tiny", make_model(), make_tokenizer())


def texts(target):
    for prompt in agreement._PROMPTS:
        prompt_ids = agreement._prompt_ids(target, prompt)
        answer = greedy(target, prompt_ids, TOKENS, target.spec.eos_ids).ids
        yield len(prompt_ids), torch.tensor([[*prompt_ids, *answer]])


def learn(target, *, shift=0, taps=(1, 2, 3), steps=120):
    """A drafter whose slot k has learned token a + k + shift from the given layers."""
    torch.set_num_threads(1)
    drafter = fitting_drafter()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    head = target.head_weight.float()
    batches = []
    for first, ids in texts(target):
        length = ids.shape[1]
        anchors = torch.arange(first, length - 4).unsqueeze(0)
        if not anchors.numel():
            continue
        context, _ = target.with_taps(taps).features(
            ids, torch.tensor([length]), last_hidden=False
        )
        embeds = target.embed(block_token_ids(ids, anchors, 4, drafter.config.mask_token_id))
        keep = torch.ones_like(anchors, dtype=torch.bool)
        mask = block_mask("sdpa", anchors, keep, length, 4, torch.tensor([length]))
        labels = ids[0][anchors[0].unsqueeze(1) + torch.arange(4) + shift].flatten()
        positions = torch.arange(length).unsqueeze(0)
        batches.append((embeds, context, positions, block_positions(anchors, 4), mask, labels))
    for _ in range(steps):
        loss = torch.zeros(())
        for *inputs, labels in batches:
            logits = drafter(*inputs)[0] @ head.T
            loss = loss + torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def test_experiment(target):
    for kw in ({}, {"shift": 1}, {"taps": (2, 3, 4)}, {"taps": (0, 1, 2)}):
        drafter = learn(target, **kw)
        print(kw, measure_agreement(target, drafter, TOKENS))
