"""The drafter's attention: block queries over context keys and their own block's keys.

Three ways to the same result: "blocks" never scores a block against another one and is the fast
one on a CPU, "sdpa" is torch's fused attention with a dense mask, "flex" is its block-sparse one
for CUDA. Each takes the mask of its own kind (``dflash.mask``).

Legend: b batch, S context length, N anchors, B block size, Q = N * B queries, L keys, h query
heads, g key/value heads, r = h / g, D head dimension.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

__all__ = ["Backend", "attend", "attend_blocks"]

Backend = Literal["blocks", "sdpa", "flex"]


def attend(q_bhQD: Tensor, k_bgLD: Tensor, v_bgLD: Tensor, mask: Any, backend: Backend) -> Tensor:
    """Attention over one run of keys, with grouped keys and values: ``[b, h, Q, D]``.

    ``mask`` is a ``BlockMask`` for "flex", else a bool tensor (True = visible) or None for all.
    """
    if backend == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        out: Tensor = flex_attention(q_bhQD, k_bgLD, v_bgLD, block_mask=mask, enable_gqa=True)
        return out
    repeats = q_bhQD.shape[1] // k_bgLD.shape[1]
    if repeats > 1:
        # Explicit, since the fused CPU kernel is left for a slow one when it must group itself.
        k_bgLD = k_bgLD.repeat_interleave(repeats, dim=1)
        v_bgLD = v_bgLD.repeat_interleave(repeats, dim=1)
    return nnf.scaled_dot_product_attention(q_bhQD, k_bgLD, v_bgLD, attn_mask=mask)


def attend_blocks(
    q_bhQD: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    seen_bNS: Tensor,
) -> Tensor:
    """One softmax over (context keys that the block sees, own block's keys): ``[b, h, Q, D]``.

    ``context`` and ``block`` are (keys, values), ``[b, g, S, D]`` and ``[b, g, Q, D]``;
    ``seen_bNS`` is ``mask.context_visible``. A dense mask spends Q * (S + Q) scores per head,
    this Q * (S + B): with many anchors most of the difference is blocks scored to be hidden.
    """
    (k_ctx, v_ctx), (k_blk, v_blk) = context, block
    b, h, queries, dim = q_bhQD.shape
    g, (n, length) = k_ctx.shape[1], seen_bNS.shape[1:]
    r, size = h // g, queries // n
    # Query heads h = (g, r); scale the queries, which are the smallest operand.
    q = q_bhQD * dim**-0.5
    scores_ctx = q.reshape(b, g, r * queries, dim) @ k_ctx.transpose(2, 3)
    scores_ctx = scores_ctx.float().view(b, g, r, n, size, length)
    scores_ctx = scores_ctx.masked_fill(~seen_bNS[:, None, None, :, None, :], -torch.inf)
    own = (b, g, 1, n, size, dim)
    scores_blk = (q.reshape(b, g, r, n, size, dim) @ k_blk.reshape(own).transpose(4, 5)).float()
    # The own block is always visible, so the maximum is finite whatever the context.
    top = torch.maximum(
        scores_ctx.amax(-1, keepdim=True), scores_blk.amax(-1, keepdim=True)
    ).detach()
    e_ctx, e_blk = (scores_ctx - top).exp(), (scores_blk - top).exp()
    total = e_ctx.sum(-1, keepdim=True) + e_blk.sum(-1, keepdim=True)
    mixed_ctx = e_ctx.to(v_ctx.dtype).view(b, g, r * queries, length) @ v_ctx
    mixed_blk = e_blk.to(v_blk.dtype) @ v_blk.reshape(own)
    mixed = mixed_ctx.view(b, g, r, n, size, dim).float() + mixed_blk.float()
    out: Tensor = (mixed / total).to(q_bhQD.dtype).view(b, h, queries, dim)
    return out
