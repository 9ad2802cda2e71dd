"""Which tokens a round keeps: greedy choice, sampling, and rejection of drafted tokens (paper 3).

At temperature 0 a token is the target's argmax. Above it, a token follows the target's own
distribution p (temperature, then top-k, then top-p), whatever the drafter proposes:

- a *greedy* proposal d is kept where the target's own sample equals it. That is rejection sampling
  with a proposal q that is sure of d (kept with probability p(d), else a sample of the rest), and
  the sample is the one that decoding without a drafter draws: with the same seed, the same text;
- a *sampled* proposal d ~ q is kept with probability min(1, p(d) / q(d)), else replaced by a
  sample of max(p - q, 0) (Leviathan et al. 2023, arXiv 2211.17192).

All randomness comes in as uniform numbers, three for each new token: for the draft, for keeping it,
and for the final sample. Which round decides a token changes nothing about its numbers.

Legend: b rows, W block slots, V vocabulary; the block's slots 1..W-1 hold the W-1 drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dflash.errors import GenerationError

__all__ = ["Proposal", "Sampling", "Verified", "choose", "propose", "verify"]

Proposal = Literal["greedy", "sampled"]


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Raises GenerationError for a value outside its range."""

    temperature: float = 0.0
    """0: the most likely token."""
    top_k: int = 0
    """Keep so many of the likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability; 1 = all."""
    proposal: Proposal = "greedy"
    """How the drafter proposes at a temperature above 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise GenerationError(
                f"temperature is {self.temperature}; it is 0 (greedy) or a finite number above it"
            )
        if self.top_k < 0:
            raise GenerationError(f"top_k is {self.top_k}; it is a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p is {self.top_p}; it is in (0, 1]")
        if self.proposal not in ("greedy", "sampled"):
            raise GenerationError(f"proposal is {self.proposal!r}; it is greedy or sampled")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution ``[..., V]`` in float64 that tokens are drawn from."""
        scaled = logits.double() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        p = scaled.softmax(dim=-1)
        if self.top_p < 1:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            # A token stays while those before it do not reach top_p, so one always stays.
            kept = ordered.cumsum(dim=-1) - ordered < self.top_p
            p = torch.zeros_like(p).scatter(-1, order, ordered * kept)
            p = p / p.sum(dim=-1, keepdim=True)
        return p


@dataclass(frozen=True)
class Verified:
    """What a round gives each row: its first ``accepted_b + 1`` tokens."""

    tokens_bW: Tensor
    accepted_b: Tensor
    """Drafted tokens kept, 0..W-1."""
    ties_bW: Tensor
    """Bool: the choice was within the rounding of the target's type (at temperature 0)."""


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulated ``p [..., V]`` passes ``uniform [...]``; int64 ``[...]``."""
    cumulated = p.cumsum(dim=-1)
    point = uniform.unsqueeze(-1) * cumulated[..., -1:]
    # Right of equals: a token without probability is never at that place.
    found = torch.searchsorted(cumulated, point, right=True).squeeze(-1)
    return found.clamp(max=p.shape[-1] - 1)


def choose(
    logits: Tensor, sampling: Sampling, uniform: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The target's tokens ``[...]`` of ``logits [..., V]``, and which of them are ties.

    ``dtype`` is the type that the logits were computed in: a tie is a lead over the second best
    that is not above one of its rounding steps, so that other arithmetic may decide otherwise.
    """
    if sampling.greedy:
        best = logits.topk(2, dim=-1).values
        lead = best[..., 0] - best[..., 1]
        ties = lead <= torch.finfo(dtype).eps * best[..., 0].abs()
        return logits.argmax(dim=-1), ties
    assert uniform is not None
    tokens = draw(sampling.probabilities(logits), uniform)
    return tokens, torch.zeros_like(tokens, dtype=torch.bool)


def propose(
    logits: Tensor, sampling: Sampling, uniform: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``(drafted [...], q [..., V])`` of the drafter's logits; no q where proposals are greedy."""
    if sampling.greedy or sampling.proposal == "greedy":
        return logits.argmax(dim=-1), None
    assert uniform is not None
    q = sampling.probabilities(logits)
    return draw(q, uniform), q


def verify(
    logits_bWV: Tensor,
    drafted: Tensor,
    q: Tensor | None,
    sampling: Sampling,
    uniforms_bW3: Tensor | None,
    dtype: torch.dtype,
) -> Verified:
    """The tokens of a round, from the target's logits behind every slot of the block.

    ``drafted`` is ``[b, W-1]``, ``q`` ``[b, W-1, V]`` for sampled proposals; ``uniforms_bW3`` are
    those of the tokens that the slots predict (None at temperature 0).
    """
    final = None if uniforms_bW3 is None else uniforms_bW3[..., 2]
    if q is None:
        tokens, ties = choose(logits_bWV, sampling, final, dtype)
        kept = (tokens[:, :-1] == drafted).long().cumprod(dim=1)
        return Verified(tokens, kept.sum(dim=1), ties)
    assert uniforms_bW3 is not None
    assert final is not None
    p = sampling.probabilities(logits_bWV)
    p_drafted, q_drafted = (
        each.gather(-1, drafted.unsqueeze(-1)).squeeze(-1) for each in (p[:, :-1], q)
    )
    kept = (uniforms_bW3[:, :-1, 1] * q_drafted < p_drafted).long().cumprod(dim=1)
    rest = (p[:, :-1] - q).clamp(min=0)
    # p = q leaves nothing over; such a slot is never rejected, and p keeps its sample defined.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p[:, :-1])
    finals = draw(torch.cat([rest, p[:, -1:]], dim=1), final)
    accepted = kept.sum(dim=1)
    tokens = torch.cat([torch.where(kept.bool(), drafted, finals[:, :-1]), finals[:, -1:]], dim=1)
    return Verified(tokens, accepted, torch.zeros_like(tokens, dtype=torch.bool))
