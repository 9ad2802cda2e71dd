"""Where the drafter taps the target, where its blocks sit, and how fast its slots lose weight.

Legend: b batch, S context length, N anchors per sequence, B block size (anchor included),
Q = N * B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.errors import ConfigError

__all__ = ["block_positions", "block_token_ids", "decay_gamma", "target_layer_ids"]

# (block size, gamma) as published: the paper's Eq. 4 with its three block sizes.
_GAMMA_POINTS = ((8, 4.0), (10, 5.0), (16, 7.0))


def target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The target layers whose outputs are tapped, shallow to deep (paper A.3).

    ``round(1 + i * (N_t - 4) / (n - 1))`` with Python's round-half-to-even; one tap is the middle
    layer ``N_t // 2``. Id ``l`` means the output of decoder layer ``l``, counted from 0, that is
    ``hidden_states[l + 1]`` in transformers.

    Raises ConfigError when the taps would not be that many different layers.
    """
    if num_taps < 1:
        raise ConfigError(f"the number of tapped target layers is {num_taps}; it must be >= 1")
    if num_target_layers < 1:
        raise ConfigError(f"the target has {num_target_layers} layers; it must have at least 1")
    if num_taps == 1:
        return (num_target_layers // 2,)
    # The span runs from layer 1 to the third from last, so it holds N_t - 3 layers.
    if num_taps > num_target_layers - 3:
        raise ConfigError(
            f"{num_taps} taps do not fit a target of {num_target_layers} layers: "
            f"at most {max(1, num_target_layers - 3)}"
        )
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def decay_gamma(block_size: int) -> float:
    """The decay constant of the loss weights, in slots, for a block size (paper Eq. 4).

    The published pairs are 8 -> 4, 10 -> 5, 16 -> 7. Between and beyond them the line through the
    two nearest pairs is used: B / 2 up to 10, then 5 + (B - 10) / 3.

    Raises ConfigError for a block without a draft slot (block_size < 2).
    """
    _check_block_size(block_size)
    points = _GAMMA_POINTS
    (x0, y0), (x1, y1) = points[:2] if block_size <= points[1][0] else points[1:]
    return y0 + (block_size - x0) * (y1 - y0) / (x1 - x0)


def block_positions(
    anchors_bN: Tensor, block_size: int, context_positions_bS: Tensor | None = None
) -> Tensor:
    """RoPE positions of every block slot: int64 ``[b, Q]``, slot k of anchor a at ``a + k``.

    With ``context_positions_bS`` (packed rows, where positions restart in each document) the
    anchor's own entry is the base instead of its index in the row.
    """
    _check_block_size(block_size)
    base_bN = (
        anchors_bN if context_positions_bS is None else context_positions_bS.gather(1, anchors_bN)
    )
    slots_B = torch.arange(block_size, device=anchors_bN.device)
    return (base_bN.unsqueeze(-1) + slots_B).flatten(1)


def block_token_ids(
    ids_bS: Tensor, anchors_bN: Tensor, block_size: int, mask_token_id: int
) -> Tensor:
    """The drafter's input tokens, int64 ``[b, Q]``: the anchor's token, then B - 1 mask tokens."""
    _check_block_size(block_size)
    batch, num_anchors = anchors_bN.shape
    block_bNB = ids_bS.new_full((batch, num_anchors, block_size), mask_token_id)
    block_bNB[:, :, 0] = ids_bS.gather(1, anchors_bN)
    return block_bNB.flatten(1)


def _check_block_size(block_size: int) -> None:
    if block_size < 2:
        raise ConfigError(
            f"block_size is {block_size}; a block is its anchor and at least one draft slot, "
            "so it must be >= 2"
        )
