"""Does a drafter predict its target's text, and would it do better if it were read otherwise?

Labels shifted by one and taps off by one leave no trace in names and shapes. They show here: the
target writes some text, the drafter drafts from many places in it, and its drafts are compared with
what stands there, one token further, and with every tap one layer lower or higher.

Legend: S sequence length, N anchors, B block size, T taps, H hidden, F = T * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.chat import encode_prompt
from dflash.decode import greedy
from dflash.drafter import Drafter
from dflash.errors import DataError
from dflash.geometry import block_positions, block_token_ids
from dflash.mask import block_mask
from dflash.target import Target

__all__ = ["Agreement", "measure_agreement"]

_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "A train goes 60 km in 45 minutes. How fast is it in km/h? Show the steps.",
)
_ANCHORS = 64  # places in one text
_DRAFTED = 3  # tokens behind an anchor that count: later ones are hard for a good drafter too


@dataclass(frozen=True)
class Agreement:
    """Parts of the drafted tokens that are the target's, by how the drafter is read."""

    count: int
    """Tokens compared in each reading."""
    plain: float
    """Slot k is the token at anchor + k, taps as stored: DFlash."""
    shifted: float
    """Slot k is the token at anchor + k + 1."""
    taps: dict[int, float]
    """Every tap moved by so many layers, where all of them exist."""

    @property
    def shifted_fits_better(self) -> bool:
        return self._better(self.shifted)

    @property
    def better_offsets(self) -> list[int]:
        return [offset for offset, part in self.taps.items() if self._better(part)]

    def _better(self, part: float) -> bool:
        """Half as many again, and by more than three standard errors of the difference."""
        error = (0.5 / self.count) ** 0.5 if self.count else 1.0
        return part > 1.5 * self.plain and part - self.plain > 3 * error

    def __str__(self) -> str:
        taps = "".join(f", {part:.0%} with taps {o:+d}" for o, part in self.taps.items())
        return (
            f"{self.plain:.0%} of {self.count} drafted tokens are the target's "
            f"({self.shifted:.0%} with labels shifted{taps})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.count,
            "plain": self.plain,
            "shifted_labels": self.shifted,
            "taps_moved": {f"{offset:+d}": part for offset, part in self.taps.items()},
        }


@torch.no_grad()
def measure_agreement(target: Target, drafter: Drafter, tokens: int) -> Agreement:
    """Let the target write ``tokens`` tokens after a few questions, and draft all over them."""
    ids = drafter.config.target_layer_ids
    offsets = [
        offset
        for offset in (-1, 1)
        if min(ids) + offset >= 0 and max(ids) + offset < target.spec.num_layers
    ]
    count, hits = 0, dict.fromkeys(["plain", "shifted", *offsets], 0)
    for prompt in _PROMPTS:
        prompt_ids = _prompt_ids(target, prompt)
        answer = greedy(target, prompt_ids, tokens, target.spec.eos_ids).ids
        ids_1S = torch.tensor([[*prompt_ids, *answer]], device=target.device)
        anchors_1N = _anchors(len(prompt_ids), ids_1S.shape[1], _drafted(drafter))
        if not anchors_1N.numel():
            continue
        states = _layer_states(target, ids_1S, {i + o for i in ids for o in (0, *offsets)})
        for offset in (0, *offsets):
            context_1SF = torch.cat([states[i + offset] for i in ids], dim=-1)
            drafts_NB = _drafts(target, drafter, ids_1S, context_1SF, anchors_1N.to(target.device))
            found = _hits(drafts_NB, ids_1S[0], anchors_1N[0], _drafted(drafter))
            hits["plain" if offset == 0 else offset] += found[0]
            hits["shifted"] += found[1] if offset == 0 else 0
        count += anchors_1N.numel() * _drafted(drafter)
    parts = {key: found / max(1, count) for key, found in hits.items()}
    return Agreement(count, parts["plain"], parts["shifted"], {o: parts[o] for o in offsets})


def _drafted(drafter: Drafter) -> int:
    return min(_DRAFTED, drafter.config.block_size - 1)


def _prompt_ids(target: Target, text: str) -> list[int]:
    try:
        return encode_prompt(target.tokenizer, [{"role": "user", "content": text}], "the probe")
    except DataError:  # a base model without a chat template continues the text
        return [int(i) for i in target.tokenizer(text)["input_ids"]]


def _anchors(first: int, length: int, drafted: int) -> Tensor:
    """Positions int64 ``[1, N]`` in the answer with ``drafted`` tokens behind them, spread out."""
    every = torch.arange(first, max(first, length - drafted))
    if len(every) > _ANCHORS:
        every = every[torch.linspace(0, len(every) - 1, _ANCHORS).long()]
    return every.unsqueeze(0)


def _layer_states(target: Target, ids_1S: Tensor, layers: set[int]) -> dict[int, Tensor]:
    """Outputs ``[1, S, H]`` of some target layers."""
    order: Sequence[int] = sorted(layers)
    lengths_1 = torch.tensor([ids_1S.shape[1]])
    context, _ = target.with_taps(order).features(ids_1S, lengths_1, last_hidden=False)
    return dict(zip(order, context.chunk(len(order), dim=-1), strict=True))


def _drafts(
    target: Target, drafter: Drafter, ids_1S: Tensor, context_1SF: Tensor, anchors_1N: Tensor
) -> Tensor:
    """The drafter's best token of every slot: int64 ``[N, B]``."""
    config, length = drafter.config, ids_1S.shape[1]
    hidden_1QH = drafter(
        target.embed(block_token_ids(ids_1S, anchors_1N, config.block_size, config.mask_token_id)),
        context_1SF,
        torch.arange(length, device=ids_1S.device).unsqueeze(0),
        block_positions(anchors_1N, config.block_size),
        block_mask(
            "sdpa",
            anchors_1N,
            torch.ones_like(anchors_1N, dtype=torch.bool),
            length,
            config.block_size,
            torch.tensor([length], device=ids_1S.device),
        ),
    )
    best: Tensor = target.head(hidden_1QH)[0].argmax(dim=-1).view(-1, config.block_size)
    return best.cpu()


def _hits(drafts_NB: Tensor, ids_S: Tensor, anchors_N: Tensor, drafted: int) -> tuple[int, int]:
    """How many of the ``drafted`` tokens behind each anchor are right: plain, and shifted."""
    behind_ND = anchors_N.unsqueeze(1) + torch.arange(1, drafted + 1)
    wanted_ND = ids_S.cpu()[behind_ND]
    plain = int((drafts_NB[:, 1 : drafted + 1] == wanted_ND).sum())
    return plain, int((drafts_NB[:, :drafted] == wanted_ND).sum())
