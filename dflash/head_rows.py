"""The rows of the head that the loss computes when it is restricted (loss.head_vocab = seen).

A cheap target's head is most of a drafter's step on a CPU: with a vocabulary of 49,152 and a few
thousand tokens in the training data, all other rows hardly ever win. Decoding uses all rows.

Legend: L a sequence's length, H hidden, V vocabulary, k best tokens per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash.feature_store import Sequences


def supervised_tokens(examples: Sequence[Sequences]) -> set[int]:
    """Every token that can be a label."""
    return {
        token
        for example in examples
        for token, counts in zip(example.ids, example.loss_mask, strict=True)
        if counts
    }


def top_tokens(
    last_LH: Tensor,
    loss_mask: Sequence[bool] | Sequence[int],
    head: Callable[[Tensor], Tensor],
    k: int,
) -> set[int]:
    """The target's `k` best tokens wherever it predicts a supervised token (one position ahead)."""
    predicts_L = torch.tensor([*loss_mask[1:], False], dtype=torch.bool)
    states_PH = last_LH[predicts_L]
    found: set[int] = set()
    for part_PH in torch.split(states_PH, 512):  # logits of all positions would be gigabytes
        found.update(head(part_PH).topk(k, dim=-1).indices.flatten().tolist())
    return found
