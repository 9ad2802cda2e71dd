"""How many drafted tokens the target accepts: counting, and the figures made of the counts.

An *acceptance length* (tau entry) is what one target call yields: the accepted draft tokens plus
one bonus token, so 1..B, and 1.00 for a drafter that is never right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash.errors import ConfigError

__all__ = [
    "AcceptanceStats",
    "accepted_length",
    "joint_acceptance_lengths",
    "slot_hits",
]


def accepted_length(draft_ids: Sequence[int] | Tensor, target_ids: Sequence[int] | Tensor) -> int:
    """How many leading draft tokens equal the target's (0..B-1). The tau entry is one more.

    ``target_ids`` may be longer: the target's last token, the bonus, has no draft beside it.
    """
    count = 0
    for drafted, wanted in zip(_as_list(draft_ids), _as_list(target_ids), strict=False):
        if drafted != wanted:
            break
        count += 1
    return count


def slot_hits(correct_bNB: Tensor, weights_bNB: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced ``(right predictions, predictions)`` of each slot, int64 ``[B]`` each.

    Slot 0 predicts nothing and reads (0, 0).
    """
    counted_bNB = weights_bNB > 0
    hits_B = (correct_bNB & counted_bNB).flatten(0, -2).sum(dim=0)
    return hits_B, counted_bNB.flatten(0, -2).sum(dim=0)


def joint_acceptance_lengths(correct_bNB: Tensor, weights_bNB: Tensor) -> Tensor:
    """Teacher-forced acceptance length of each block with a label: int64 ``[blocks]``.

    The leading run of right slots in one block, plus one. It is the run itself, not the product
    of the slots' averages, which misjudges it; only decoding gives the real figure.
    """
    counted_bNB = weights_bNB > 0
    run_bNB = (correct_bNB & counted_bNB)[..., 1:].cumprod(dim=-1)
    lengths_bN = run_bNB.sum(dim=-1) + 1
    return lengths_bN[counted_bNB.any(dim=-1)]


@dataclass
class AcceptanceStats:
    """Acceptance lengths of decoded responses, gathered one response at a time.

    ``macro`` is the mean of the responses' own means (z-lab's convention), ``pooled`` the mean of
    all target calls (that of vLLM's counters). Rounds past a stop token or the length limit count
    in full, as z-lab counts them.
    """

    block_size: int
    rounds_of_length: list[int] = field(default_factory=list)
    """How many rounds had acceptance length i + 1, i = 0..B-1."""
    response_means: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; it must be >= 1")
        self.rounds_of_length = self.rounds_of_length or [0] * self.block_size
        if len(self.rounds_of_length) != self.block_size:
            raise ConfigError(
                f"{len(self.rounds_of_length)} acceptance counts for blocks of {self.block_size}"
            )

    def add(self, accept_lengths: Iterable[int]) -> None:
        """Add the rounds of one response; one without any round is left out.

        Raises ConfigError for a length outside 1..block_size.
        """
        lengths = list(accept_lengths)
        for length in lengths:
            if not 1 <= length <= self.block_size:
                raise ConfigError(
                    f"acceptance length {length} is impossible with blocks of {self.block_size}"
                )
        for length in lengths:
            self.rounds_of_length[length - 1] += 1
        if lengths:
            self.response_means.append(sum(lengths) / len(lengths))

    def merge(self, other: AcceptanceStats) -> None:
        """Add all responses of ``other``. Raises ConfigError for another block size."""
        if other.block_size != self.block_size:
            raise ConfigError(
                f"acceptance of blocks of {other.block_size} cannot be merged into that of "
                f"blocks of {self.block_size}"
            )
        pairs = zip(self.rounds_of_length, other.rounds_of_length, strict=True)
        self.rounds_of_length = [a + b for a, b in pairs]
        self.response_means.extend(other.response_means)

    @property
    def rounds(self) -> int:
        """Target calls that verified a block."""
        return sum(self.rounds_of_length)

    @property
    def responses(self) -> int:
        return len(self.response_means)

    @property
    def macro(self) -> float:
        """Mean over responses of each response's mean acceptance length; nan without any."""
        if not self.response_means:
            return float("nan")
        return sum(self.response_means) / len(self.response_means)

    @property
    def pooled(self) -> float:
        """Mean acceptance length over all rounds; nan without any."""
        total = sum((i + 1) * count for i, count in enumerate(self.rounds_of_length))
        return total / self.rounds if self.rounds else float("nan")

    @property
    def per_position(self) -> list[float]:
        """Share of rounds in which draft slot k = 1..B-1 was accepted (with all before it)."""
        if not self.rounds:
            return [float("nan")] * (self.block_size - 1)
        return [sum(self.rounds_of_length[k:]) / self.rounds for k in range(1, self.block_size)]

    def as_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "block_size": self.block_size,
            "responses": self.responses,
            "rounds": self.rounds,
            "acceptance_length_macro": self.macro,
            "acceptance_length_pooled": self.pooled,
            "per_position": self.per_position,
            "rounds_of_length": list(self.rounds_of_length),
        }


def _as_list(ids: Sequence[int] | Tensor) -> list[int]:
    if isinstance(ids, torch.Tensor):
        return [int(i) for i in ids.flatten().tolist()]
    return list(ids)
