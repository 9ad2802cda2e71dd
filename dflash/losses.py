"""Labels, weights, and the loss sums of drafted blocks (paper Eq. 4).

Every loss is a pair (numerator, denominator): the drafters add up both over all their
microbatches before the one division, since a mean of means would weigh tokens unequally. The
denominator is the sum of the *decayed* weights.

Legend: b batch, S context length, N anchors per sequence, B block size, P flattened block slots
(any shape of b * N * B), H hidden, V head rows in use, C rows of one chunk.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dflash.errors import ConfigError

__all__ = [
    "DistillKind",
    "LossSums",
    "block_labels",
    "cross_entropy_sums",
    "distillation_sums",
    "loss_sums",
    "teacher_states",
]

DistillKind = Literal["kl", "tv"]
_KINDS: tuple[DistillKind, ...] = ("kl", "tv")
# Float32 logits held at once: little more than a cache on a CPU, a GiB on an accelerator; but
# always enough slots to keep a matrix product busy.
_CPU_CHUNK_LOGITS = 1 << 21
_DEVICE_CHUNK_LOGITS = 1 << 28


def block_labels(
    ids_bS: Tensor,
    anchors_bN: Tensor,
    keep_bN: Tensor,
    loss_mask_bS: Tensor,
    lengths_b: Tensor,
    block_size: int,
    gamma: float,
    *,
    docs_bS: Tensor | None = None,
    cut_at_gap: bool = True,
) -> tuple[Tensor, Tensor]:
    """Labels (int64) and loss weights (float32) of all block slots, each ``[b, N, B]``.

    Slot k of anchor a is labelled with the token at ``a + k`` (no shift) and weighs
    ``exp(-(k - 1) / gamma)`` if the block is kept, k >= 1, the position lies inside the sequence
    (and in the anchor's document) and is supervised; else 0. ``gamma=math.inf`` turns decay off.

    ``cut_at_gap`` also drops every slot behind an unsupervised one: a block that runs out of one
    answer, through the user's turn, into the next answer asks for what the target never decodes
    in one piece. With one answer per sequence it changes nothing.
    """
    if not gamma > 0:
        raise ConfigError(f"gamma is {gamma}; the decay constant must be > 0 (inf for no decay)")
    length = ids_bS.shape[1]
    device = ids_bS.device
    slots_B = torch.arange(block_size, device=device)
    position_bNB = anchors_bN.unsqueeze(-1) + slots_B
    limit_b11 = lengths_b.to(device).clamp(max=length)[:, None, None]
    inside_bNB = position_bNB < limit_b11
    flat_bQ = position_bNB.clamp(max=length - 1).flatten(1)
    labels_bNB = ids_bS.gather(1, flat_bQ).view_as(position_bNB)
    supervised_bNB = loss_mask_bS.bool().gather(1, flat_bQ).view_as(position_bNB) & inside_bNB
    if docs_bS is not None:
        doc_bNB = docs_bS.gather(1, flat_bQ).view_as(position_bNB)
        supervised_bNB = supervised_bNB & (doc_bNB == doc_bNB[:, :, :1])
    counted_bNB = supervised_bNB & keep_bN.unsqueeze(-1)
    counted_bNB[:, :, 0] = keep_bN
    if cut_at_gap:
        counted_bNB = counted_bNB.cumprod(dim=-1).bool()
    decay_B = torch.exp(-(slots_B - 1).float() / gamma)
    decay_B[0] = 0.0
    return labels_bNB, counted_bNB * decay_B


def teacher_states(last_hidden_bSH: Tensor, anchors_bN: Tensor, block_size: int) -> Tensor:
    """The target's final-normed hidden state that predicts each slot's token: ``[b, N, B, H]``.

    The token at ``a + k`` is predicted at ``a + k - 1``. Slot 0 predicts nothing; its entry is a
    stand-in, as are those of slots beyond the sequence, and has weight 0 in the loss.
    """
    batch, length, hidden = last_hidden_bSH.shape
    offsets_B = torch.arange(block_size, device=anchors_bN.device) - 1
    position_bQ = (anchors_bN.unsqueeze(-1) + offsets_B).clamp(0, length - 1).flatten(1)
    gathered = last_hidden_bSH.gather(1, position_bQ.unsqueeze(-1).expand(-1, -1, hidden))
    return gathered.view(batch, anchors_bN.shape[1], block_size, hidden)


class LossSums(NamedTuple):
    """Sums over block slots; only ``numerator`` carries a gradient."""

    numerator: Tensor
    """Sum of w * (ce_weight * CE + distill_weight * distillation), float32 scalar."""
    denominator: Tensor
    """Sum of w."""
    cross_entropy: Tensor
    """Sum of w * CE (0 where it was not asked for)."""
    distillation: Tensor
    """Sum of w * distillation (0 where it was not asked for)."""
    correct_P: Tensor
    """Bool: the drafter's argmax is the label; False where w is 0."""


def cross_entropy_sums(
    hidden_PH: Tensor,
    labels_P: Tensor,
    weights_P: Tensor,
    head_VH: Tensor,
    *,
    chunk: int | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy to the labels: ``(numerator, denominator, correct_P)``.

    See ``loss_sums`` for the arguments.
    """
    sums = loss_sums(hidden_PH, labels_P, weights_P, head_VH, chunk=chunk, rows=rows)
    return sums.numerator, sums.denominator, sums.correct_P


def distillation_sums(
    hidden_PH: Tensor,
    teacher_hidden_PH: Tensor,
    weights_P: Tensor,
    head_VH: Tensor,
    *,
    kind: DistillKind = "kl",
    temperature: float = 1.0,
    chunk: int | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted distance to the target's own distribution: ``(numerator, denominator)``.

    See ``loss_sums`` for the arguments.
    """
    sums = loss_sums(
        hidden_PH,
        None,
        weights_P,
        head_VH,
        teacher_hidden_PH=teacher_hidden_PH,
        ce_weight=0.0,
        distill_weight=1.0,
        kind=kind,
        temperature=temperature,
        chunk=chunk,
        rows=rows,
    )
    return sums.numerator, sums.denominator


def loss_sums(
    hidden_PH: Tensor,
    labels_P: Tensor | None,
    weights_P: Tensor,
    head_VH: Tensor,
    *,
    teacher_hidden_PH: Tensor | None = None,
    ce_weight: float = 1.0,
    distill_weight: float = 0.0,
    kind: DistillKind = "kl",
    temperature: float = 1.0,
    chunk: int | None = None,
    rows: Tensor | None = None,
) -> LossSums:
    """Cross-entropy and distillation in one pass over the student's logits.

    ``hidden_PH`` is the drafter's output; ``head_VH`` the target's frozen head, whose dtype is
    that of the matrix products (softmax and sums are float32 always). ``kind`` is "kl", the
    forward KL(target || drafter) times temperature squared, or "tv", the total variation
    1 - sum(min(p, q)). ``rows`` (int64) restricts logits to some of the head's rows, for cheap
    training; distributions are then renormalised over them and every label must be among them.

    Logits exist for ``chunk`` slots at a time only, slots of weight 0 are skipped, and since the
    head is frozen the gradient is made in the same pass: no recomputation, no V-sized tensor kept.

    Raises ConfigError for contradictory arguments and for a label outside ``rows``.
    """
    distils = distill_weight != 0.0
    _check_arguments(labels_P, ce_weight, teacher_hidden_PH, distils, kind, temperature, chunk)
    used = weights_P.nonzero().squeeze(-1)
    weights_U = weights_P[used].float()
    labels_U = None if labels_P is None else labels_P[used]
    if rows is not None:
        if labels_U is not None:
            labels_U = _labels_in_rows(labels_U, rows, head_VH.shape[0])
        head_VH = head_VH.index_select(0, rows)
    teacher_UH = None
    if distils and teacher_hidden_PH is not None:
        teacher_UH = teacher_hidden_PH.detach()[used]
    terms = _Terms(ce_weight if labels_P is not None else 0.0, distill_weight, kind, temperature)
    chunk = chunk or _default_chunk(head_VH)
    hidden_UH = hidden_PH.index_select(0, used)
    numerator, cross_entropy, distillation, correct_U = _HeadSums.apply(  # type: ignore[no-untyped-call]
        hidden_UH, labels_U, weights_U, head_VH, teacher_UH, terms, chunk
    )
    correct_P = torch.zeros_like(weights_P, dtype=torch.bool)
    correct_P[used] = correct_U
    return LossSums(numerator, weights_U.sum(), cross_entropy, distillation, correct_P)


class _Terms(NamedTuple):
    ce_weight: float
    distill_weight: float
    kind: DistillKind
    temperature: float


class _HeadSums(torch.autograd.Function):
    """Head, softmax, losses and their gradient for the hidden states, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: Tensor,
        labels_U: Tensor | None,
        weights_U: Tensor,
        head_VH: Tensor,
        teacher_UH: Tensor | None,
        terms: _Terms,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_gradient = bool(ctx.needs_input_grad[0])
        ce = weights_U.new_zeros(())
        distillation = weights_U.new_zeros(())
        correct_U = torch.zeros_like(weights_U, dtype=torch.bool)
        gradient_UH = torch.empty_like(hidden_UH) if wants_gradient else None
        # The caller's autocast must not choose the dtype of the head's products: the head does.
        with torch.autocast(hidden_UH.device.type, enabled=False):
            for start in range(0, hidden_UH.shape[0], chunk):
                part = slice(start, start + chunk)
                got = _chunk_sums(
                    hidden_UH[part],
                    None if labels_U is None else labels_U[part],
                    weights_U[part],
                    head_VH,
                    None if teacher_UH is None else teacher_UH[part],
                    terms,
                    wants_gradient,
                )
                ce += got.ce
                distillation += got.distillation
                if got.correct_C is not None:
                    correct_U[part] = got.correct_C
                if gradient_UH is not None and got.gradient_CH is not None:
                    gradient_UH[part] = got.gradient_CH
        if gradient_UH is not None:
            ctx.save_for_backward(gradient_UH)
        ctx.mark_non_differentiable(ce, distillation, correct_U)
        total = terms.ce_weight * ce + terms.distill_weight * distillation
        return total, ce, distillation, correct_U

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_unused: Any) -> tuple[Tensor | None, ...]:
        (gradient_UH,) = ctx.saved_tensors
        scaled_UH = gradient_UH * grad_total.to(gradient_UH.dtype)
        return scaled_UH, None, None, None, None, None, None


class _ChunkSums(NamedTuple):
    ce: Tensor
    distillation: Tensor
    correct_C: Tensor | None
    gradient_CH: Tensor | None


def _chunk_sums(
    hidden_CH: Tensor,
    labels_C: Tensor | None,
    weights_C: Tensor,
    head_VH: Tensor,
    teacher_CH: Tensor | None,
    terms: _Terms,
    wants_gradient: bool,
) -> _ChunkSums:
    logits_CV = _logits(hidden_CH, head_VH)
    zero = weights_C.new_zeros(())
    ce, distillation, correct_C = zero, zero, None
    slope_CV = None
    if teacher_CH is not None:
        teacher_CV = _logits(teacher_CH, head_VH)
        value_C, slope_CV = _distill(logits_CV, teacher_CV, terms, wants_gradient)
        distillation = (weights_C * value_C).sum()
        if slope_CV is not None:
            slope_CV.mul_((weights_C * terms.distill_weight).unsqueeze(-1))
    if labels_C is not None:
        label_C1 = labels_C.unsqueeze(-1)
        label_logit_C = logits_CV.gather(1, label_C1).squeeze(-1)
        top_C, best_C = logits_CV.max(dim=-1)
        correct_C = best_C == labels_C
        # The logits are not needed any more: their buffer becomes the probabilities.
        exp_CV = logits_CV.sub_(top_C.unsqueeze(-1)).exp_()
        total_C = exp_CV.sum(dim=-1)
        ce = (weights_C * (total_C.log() + top_C - label_logit_C)).sum()
        if wants_gradient and terms.ce_weight:
            scale_C = weights_C * terms.ce_weight
            ce_slope_CV = exp_CV.mul_((scale_C / total_C).unsqueeze(-1))
            ce_slope_CV.scatter_add_(1, label_C1, -scale_C.unsqueeze(-1))
            slope_CV = ce_slope_CV if slope_CV is None else slope_CV.add_(ce_slope_CV)
    gradient_CH = None
    if wants_gradient and slope_CV is not None:
        gradient_CH = (slope_CV.to(head_VH.dtype) @ head_VH).to(hidden_CH.dtype)
    return _ChunkSums(ce, distillation, correct_C, gradient_CH)


def _distill(
    student_CV: Tensor, teacher_CV: Tensor, terms: _Terms, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Distance per slot and its slope for the student's logits; ``student_CV`` is left as it is."""
    heat = terms.temperature
    log_q_CV = torch.log_softmax(student_CV / heat if heat != 1.0 else student_CV, dim=-1)
    log_p_CV = torch.log_softmax(teacher_CV / heat if heat != 1.0 else teacher_CV, dim=-1)
    p_CV = log_p_CV.exp()
    if terms.kind == "kl":
        value_C = (p_CV * log_p_CV.sub_(log_q_CV)).sum(dim=-1) * heat**2
        slope_CV = log_q_CV.exp_().sub_(p_CV).mul_(heat) if wants_gradient else None
        return value_C, slope_CV
    q_CV = log_q_CV.exp_()
    value_C = 1.0 - torch.minimum(p_CV, q_CV).sum(dim=-1)
    if not wants_gradient:
        return value_C, None
    # d(-sum min(p, q)) / d logit_j = q_j * (sum of q where q < p  -  [q_j < p_j]).
    below_CV = (q_CV < p_CV).float()
    mass_C1 = (q_CV * below_CV).sum(dim=-1, keepdim=True)
    return value_C, q_CV * (mass_C1 - below_CV) / heat


def _logits(hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
    return (hidden_CH.to(head_VH.dtype) @ head_VH.t()).float()


def _default_chunk(head_VH: Tensor) -> int:
    budget = _CPU_CHUNK_LOGITS if head_VH.device.type == "cpu" else _DEVICE_CHUNK_LOGITS
    return max(128, budget // max(1, head_VH.shape[0]))


def _labels_in_rows(labels_U: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
    """Labels as indices into ``rows``."""
    index_V = rows.new_full((vocab_size,), -1)
    index_V[rows] = torch.arange(rows.numel(), device=rows.device, dtype=rows.dtype)
    found_U = index_V[labels_U]
    missing = labels_U[found_U < 0]
    if missing.numel():
        raise ConfigError(
            f"{missing.numel()} labels are not among the {rows.numel()} head rows in use, the "
            f"first is token {int(missing[0])}; put every token of the training data into rows"
        )
    return found_U


def _check_arguments(
    labels_P: Tensor | None,
    ce_weight: float,
    teacher_PH: Tensor | None,
    distils: bool,
    kind: str,
    temperature: float,
    chunk: int | None,
) -> None:
    if labels_P is None and ce_weight != 0.0:
        raise ConfigError("cross-entropy needs labels; pass them or set ce_weight to 0")
    if distils and teacher_PH is None:
        raise ConfigError("distillation needs the target's hidden states (teacher_hidden_PH)")
    if kind not in _KINDS:
        raise ConfigError(f"distillation kind {kind!r} is unknown; known: {', '.join(_KINDS)}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"the distillation temperature is {temperature}; it must be > 0")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"the loss chunk is {chunk} slots; it must be >= 1")
