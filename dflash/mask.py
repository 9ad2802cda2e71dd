"""Which keys a draft query may see: one rule, in the form that each attention backend takes.

A key ``kv`` is visible to a query of block ``j`` with anchor ``a`` iff

- ``kv`` is context (``kv < S``), lies strictly before the anchor, inside the sequence and in the
  anchor's document; the anchor's own feature is unknown at inference, so ``kv == a`` is hidden;
- or ``kv`` is a slot of the same block ``j``: blocks are bidirectional inside, blind to others.

A dummy block (``keep`` False) sees itself only: a row without any key would be NaN in a softmax.

Legend: b batch, S context length, N anchors per sequence, B block size, Q = N * B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash.attention import Backend

__all__ = [
    "MaskMod",
    "block_mask",
    "block_mask_dense",
    "block_mask_flex",
    "block_mask_mod",
    "context_visible",
]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(
    backend: Backend,
    anchors_bN: Tensor,
    keep_bN: Tensor,
    context_len: int,
    block_size: int,
    lengths_b: Tensor,
    docs_bS: Tensor | None = None,
) -> Any:
    """The rule as the drafter's ``backend`` takes it; see the functions of the three forms."""
    if backend == "blocks":
        return context_visible(anchors_bN, keep_bN, context_len, lengths_b, docs_bS)
    make = block_mask_flex if backend == "flex" else block_mask_dense
    return make(anchors_bN, keep_bN, context_len, block_size, lengths_b, docs_bS)


def context_visible(
    anchors_bN: Tensor,
    keep_bN: Tensor,
    context_len: int,
    lengths_b: Tensor,
    docs_bS: Tensor | None = None,
) -> Tensor:
    """Bool ``[b, N, S]``: which context positions each block sees (all its slots see the same).

    This is the "blocks" backend's form, which takes for granted that a block sees itself alone.

    ``docs_bS`` holds the document number of every position of packed rows, negative for padding.
    """
    device = anchors_bN.device
    kv_S = torch.arange(context_len, device=device)
    anchor_bN1 = anchors_bN.unsqueeze(-1)
    seen_bNS = (kv_S < anchor_bN1) & (kv_S < lengths_b.to(device)[:, None, None])
    if docs_bS is not None:
        anchor_doc_bN1 = docs_bS.gather(1, anchors_bN).unsqueeze(-1)
        seen_bNS = seen_bNS & (docs_bS.unsqueeze(1) == anchor_doc_bN1) & (anchor_doc_bN1 >= 0)
    return seen_bNS & keep_bN.unsqueeze(-1)


def block_mask_dense(
    anchors_bN: Tensor,
    keep_bN: Tensor,
    context_len: int,
    block_size: int,
    lengths_b: Tensor,
    docs_bS: Tensor | None = None,
) -> Tensor:
    """The rule as a bool tensor ``[b, 1, Q, S + Q]``, True = visible, for SDPA."""
    batch, num_anchors = anchors_bN.shape
    seen_bNS = context_visible(anchors_bN, keep_bN, context_len, lengths_b, docs_bS)
    context_bQS = seen_bNS.repeat_interleave(block_size, dim=1)
    block_of_Q = torch.arange(num_anchors * block_size, device=anchors_bN.device) // block_size
    own_QQ = block_of_Q.unsqueeze(1) == block_of_Q.unsqueeze(0)
    own_bQQ = own_QQ.expand(batch, -1, -1)
    return torch.cat([context_bQS, own_bQQ], dim=2).unsqueeze(1)


def block_mask_mod(
    anchors_bN: Tensor,
    keep_bN: Tensor,
    context_len: int,
    block_size: int,
    lengths_b: Tensor,
    docs_bS: Tensor | None = None,
) -> MaskMod:
    """The rule as a ``mask_mod(b, h, q_idx, kv_idx)`` for ``torch.nn.attention.flex_attention``."""
    lengths_b = lengths_b.to(anchors_bN.device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = q_idx // block_size
        anchor = anchors_bN[b, block]
        in_context = kv_idx < context_len
        seen = in_context & (kv_idx < anchor) & (kv_idx < lengths_b[b]) & keep_bN[b, block]
        if docs_bS is not None:
            # Clamped, because flex evaluates this branch for the block's keys too.
            doc = docs_bS[b, kv_idx.clamp(max=context_len - 1)]
            anchor_doc = docs_bS[b, anchor]
            seen = seen & (doc == anchor_doc) & (anchor_doc >= 0)
        own = (kv_idx >= context_len) & ((kv_idx - context_len) // block_size == block)
        return seen | own

    return mask_mod


def block_mask_flex(
    anchors_bN: Tensor,
    keep_bN: Tensor,
    context_len: int,
    block_size: int,
    lengths_b: Tensor,
    docs_bS: Tensor | None = None,
    *,
    create: Callable[..., Any] | None = None,
) -> Any:
    """The rule as a flex ``BlockMask`` on the anchors' device.

    ``create`` is ``create_block_mask`` or a compiled form of it: uncompiled it fills a Q x (S + Q)
    tensor first, which at the paper's sizes costs gigabytes.
    """
    if create is None:
        from torch.nn.attention.flex_attention import create_block_mask

        create = create_block_mask
    batch, num_anchors = anchors_bN.shape
    num_queries = num_anchors * block_size
    return create(
        block_mask_mod(anchors_bN, keep_bN, context_len, block_size, lengths_b, docs_bS),
        B=batch,
        H=None,
        Q_LEN=num_queries,
        KV_LEN=context_len + num_queries,
        device=str(anchors_bN.device),
    )
