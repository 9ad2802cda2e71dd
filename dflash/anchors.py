"""Choose the random anchors at which a sequence is drafted during training.

Legend: b batch, S context length, N anchors per sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.errors import ConfigError

__all__ = ["sample_anchors", "valid_anchors"]


def valid_anchors(loss_mask_bS: Tensor, lengths_b: Tensor) -> Tensor:
    """Bool ``[b, S]``: True where a block may start.

    An anchor ``a`` needs two supervised tokens in a row, ``loss_mask[a]`` and
    ``loss_mask[a + 1]``, both inside the sequence: a block without a label is wasted work, and at
    inference the anchor is always a token that the target wrote itself.
    """
    mask_bS = loss_mask_bS.bool()
    valid_bS = torch.zeros_like(mask_bS)
    index_S = torch.arange(mask_bS.shape[1], device=mask_bS.device)
    inside_bS = index_S + 1 < lengths_b.to(mask_bS.device).unsqueeze(1)
    valid_bS[:, :-1] = mask_bS[:, :-1] & mask_bS[:, 1:] & inside_bS[:, :-1]
    return valid_bS


def sample_anchors(
    loss_mask_bS: Tensor,
    num_anchors: int,
    generator: torch.Generator,
    *,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw ``num_anchors`` different anchors in each sequence, uniformly over the valid ones.

    Returns ``anchors_bN`` (int64, ascending in each row) and ``keep_bN`` (bool). The width is
    always ``num_anchors``, so that shapes stay static. A sequence with fewer valid anchors uses
    all of them and fills its row's end with dummies: ``keep`` False, at the last real anchor
    (position 0 where there is none), so they are harmless to gather from and keep the order.

    ``generator`` is the caller's own: the process-wide one is shared by all threads, and a
    compilation in another thread saves and rewinds it. Raises ConfigError for ``num_anchors < 1``.
    """
    if num_anchors < 1:
        raise ConfigError(f"num_anchors is {num_anchors}; it must be >= 1")
    valid_bS = valid_anchors(loss_mask_bS, lengths)
    batch, length = valid_bS.shape
    # Random keys in [0, 1) for the valid positions, and 2 for the others, which sort behind them.
    keys_bS = torch.rand(batch, length, generator=generator, device=generator.device)
    keys_bS = keys_bS.to(valid_bS.device).masked_fill(~valid_bS, 2.0)
    drawn = min(num_anchors, length)
    chosen_bD = keys_bS.argsort(dim=1, stable=True)[:, :drawn]
    # Ascending order with the rejects last: reject = index beyond every position.
    chosen_bD = chosen_bD.masked_fill(~valid_bS.gather(1, chosen_bD), length).sort(dim=1).values
    anchors_bN = chosen_bD.new_full((batch, num_anchors), length)
    anchors_bN[:, :drawn] = chosen_bD
    keep_bN = anchors_bN < length
    last_b1 = anchors_bN.masked_fill(~keep_bN, 0).amax(dim=1, keepdim=True)
    return torch.where(keep_bN, anchors_bN, last_b1), keep_bN
