"""One batch through one drafter: anchors, blocks, mask, hidden states, loss sums.

Everything is a sum here (numerators and denominators); they are added up over batches and
drafters first and divided once, so that the loss is the mean over all supervised slots of a step
and not a mean of means.

Legend: b batch, S padded length, N anchors per sequence, B block size, Q = N * B, F features,
H hidden, V vocabulary, R head rows in the loss, P = b * N * B slots, K sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.acceptance import joint_acceptance_lengths, slot_hits
from dflash.anchors import sample_anchors
from dflash.drafter import Backend, Drafter
from dflash.feature_store import Batch
from dflash.geometry import block_positions, block_token_ids
from dflash.losses import block_labels, loss_sums, teacher_states
from dflash.mask import block_mask


@dataclass(frozen=True)
class Frozen:
    """The target's embedding and head on a drafter's device, shared by the drafters there."""

    embed_VH: Tensor
    head_VH: Tensor
    """Its dtype is that of the products with it."""
    rows_R: Tensor | None = None
    """Head rows that take part in the loss, ascending; None = all."""


@dataclass(frozen=True)
class LossTerms:
    """How a batch is drafted and what its loss consists of; see config.LossSettings."""

    num_anchors: int
    gamma: float
    ce: float
    kl: float
    temperature: float
    chunk: int | None
    autocast: bool
    """Matrix products in bfloat16, everything that adds up in float32."""
    attention: Backend = "sdpa"
    """The kind of mask that the drafter was made for."""


@dataclass(frozen=True)
class SumLayout:
    """Where each sum lies in the vector that drafters exchange."""

    block_size: int

    WEIGHT = 0
    CE = 1
    KL = 2
    BLOCKS = 3
    ACCEPTED = 4
    TOKENS = 5
    DROPPED = 6
    _FIRST_SLOT = 7

    @property
    def size(self) -> int:
        return self._FIRST_SLOT + 2 * (self.block_size - 1)

    @property
    def hits(self) -> slice:
        """Right predictions of slots 1..B-1."""
        return slice(self._FIRST_SLOT, self._FIRST_SLOT + self.block_size - 1)

    @property
    def counts(self) -> slice:
        """Supervised slots 1..B-1."""
        return slice(self._FIRST_SLOT + self.block_size - 1, self.size)


def draft_sums(
    drafter: Drafter, frozen: Frozen, batch: Batch, terms: LossTerms
) -> tuple[Tensor, Tensor]:
    """The loss's numerator (with its gradient) and all sums, float64 `[K]`, of one batch."""
    config, device = drafter.config, batch.ids_bS.device
    generator = torch.Generator(device).manual_seed(batch.anchor_seed)
    anchors_bN, keep_bN = sample_anchors(
        batch.loss_mask_bS, terms.num_anchors, generator, lengths=batch.lengths_b
    )
    labels_bNB, weights_bNB = block_labels(
        batch.ids_bS,
        anchors_bN,
        keep_bN,
        batch.loss_mask_bS,
        batch.lengths_b,
        config.block_size,
        terms.gamma,
    )
    hidden_bQH = _hidden(drafter, frozen, batch, anchors_bN, keep_bN, terms)
    teacher_PH = None
    if terms.kl and batch.last_bSH is not None:
        teacher_PH = teacher_states(batch.last_bSH, anchors_bN, config.block_size).flatten(0, 2)
    sums = loss_sums(
        hidden_bQH.flatten(0, 1),
        labels_bNB.flatten(),
        weights_bNB.flatten(),
        frozen.head_VH,
        teacher_hidden_PH=teacher_PH,
        ce_weight=terms.ce,
        distill_weight=terms.kl,
        temperature=terms.temperature,
        chunk=terms.chunk,
        rows=frozen.rows_R,
    )
    correct_bNB = sums.correct_P.view_as(labels_bNB)
    hits_B, counts_B = slot_hits(correct_bNB, weights_bNB)
    lengths_M = joint_acceptance_lengths(correct_bNB, weights_bNB)
    layout = SumLayout(config.block_size)
    sums_K = torch.zeros(layout.size, dtype=torch.float64, device=device)
    sums_K[SumLayout.WEIGHT] = sums.denominator
    sums_K[SumLayout.CE] = sums.cross_entropy
    sums_K[SumLayout.KL] = sums.distillation
    sums_K[SumLayout.BLOCKS] = len(lengths_M)
    sums_K[SumLayout.ACCEPTED] = lengths_M.sum()
    sums_K[SumLayout.TOKENS] = batch.lengths_b.sum()
    sums_K[layout.hits] = hits_B[1:].double()
    sums_K[layout.counts] = counts_B[1:].double()
    return sums.numerator, sums_K


def _hidden(
    drafter: Drafter,
    frozen: Frozen,
    batch: Batch,
    anchors_bN: Tensor,
    keep_bN: Tensor,
    terms: LossTerms,
) -> Tensor:
    """The drafter's output for all blocks, `[b, Q, H]`."""
    config = drafter.config
    rows, length = batch.ids_bS.shape
    block_bQ = block_token_ids(batch.ids_bS, anchors_bN, config.block_size, config.mask_token_id)
    mask = block_mask(
        terms.attention, anchors_bN, keep_bN, length, config.block_size, batch.lengths_b
    )
    positions_bS = torch.arange(length, device=batch.ids_bS.device).expand(rows, -1)
    with torch.autocast(batch.ids_bS.device.type, dtype=torch.bfloat16, enabled=terms.autocast):
        hidden_bQH: Tensor = drafter(
            torch.nn.functional.embedding(block_bQ, frozen.embed_VH),
            batch.context_bSF,
            positions_bS,
            block_positions(anchors_bN, config.block_size),
            mask,
        )
    return hidden_bQH
