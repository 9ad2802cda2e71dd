"""Decode held-out prompts for real, with and without the drafter, and say what it was worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash.acceptance import AcceptanceStats
from dflash.decode import DecodeTarget, greedy, speculative
from dflash.drafter import Drafter
from dflash.placement import cores


@dataclass
class Evaluation:
    """Figures over all decoded prompts. Seconds are wall time, the prompts' forwards included."""

    acceptance: AcceptanceStats
    prompts: int = 0
    tokens: int = 0
    """New tokens of the target alone."""
    drafted_tokens: int = 0
    """New tokens with the drafter: the same, if all outputs are equal."""
    greedy_seconds: float = 0.0
    drafted_seconds: float = 0.0
    differences: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, first token that differs) of each output that is not the target's own."""

    @property
    def equal(self) -> int:
        """Outputs that are the target's own greedy output."""
        return self.prompts - len(self.differences)

    @property
    def greedy_rate(self) -> float:
        """Tokens per second of the target alone."""
        return self.tokens / self.greedy_seconds if self.greedy_seconds else math.nan

    @property
    def drafted_rate(self) -> float:
        """Tokens per second with the drafter."""
        return self.drafted_tokens / self.drafted_seconds if self.drafted_seconds else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `evaluation.json`."""
        return self.acceptance.as_dict() | {
            "prompts": self.prompts,
            "outputs_equal_to_greedy": self.equal,
            "differences": [list(difference) for difference in self.differences],
            "tokens": self.tokens,
            "tokens_per_second_target": self.greedy_rate,
            "tokens_per_second_drafter": self.drafted_rate,
        }

    def rows(self, dtype: str) -> list[tuple[str, str]]:
        """The lines of the final table."""
        stats = self.acceptance
        slots = "  ".join(
            f"{k}: {100 * share:.0f} %" for k, share in enumerate(stats.per_position, start=1)
        )
        return [
            (
                "acceptance length",
                f"{stats.macro:.3f} mean of responses, {stats.pooled:.3f} pooled "
                f"(an untrained drafter: 1.00)",
            ),
            ("accepted by slot", slots),
            (
                "tokens per second",
                f"{self.greedy_rate:.1f} target alone, {self.drafted_rate:.1f} with the drafter "
                f"({self.drafted_rate / self.greedy_rate:.2f}x)",
            ),
            (
                "equal to greedy",
                f"{self.equal} of {self.prompts} outputs ({self.tokens} tokens, {dtype})",
            ),
        ]


def evaluate(
    target: DecodeTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    advance: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Decode every prompt twice, batch 1, greedily. `advance` is called after each prompt.

    GenerationError for a drafter of another target.
    """
    found = Evaluation(AcceptanceStats(drafter.config.block_size))
    for prompt in prompts[:1]:  # the first calls of a process are slow: keep them out of the times
        greedy(target, prompt, 4, stop_ids)
        speculative(target, drafter, prompt, 4, stop_ids)
    for number, prompt in enumerate(prompts):
        alone = greedy(target, prompt, max_new_tokens, stop_ids)
        drafted = speculative(target, drafter, prompt, max_new_tokens, stop_ids)
        found.prompts += 1
        found.tokens += len(alone.ids)
        found.drafted_tokens += len(drafted.ids)
        found.greedy_seconds += alone.seconds
        found.drafted_seconds += drafted.seconds
        found.acceptance.add(drafted.accept_lengths)
        if alone.ids != drafted.ids:
            found.differences.append((number, first_difference(alone.ids, drafted.ids)))
        advance()
    return found


def decoding_threads(target: DecodeTarget, prompt: Sequence[int]) -> int:
    """CPU threads, one or all cores, with which the target alone decodes faster now.

    A step reads all weights for one token, which a single core may do as fast as the memory allows;
    and where others use the machine too, threads that wait for each other lose most of their time.
    """
    seconds = {}
    for threads in sorted({1, cores()}):
        torch.set_num_threads(threads)
        seconds[threads] = min(
            run.seconds - run.prefill_seconds for run in (greedy(target, prompt, 6) for _ in "ab")
        )
    return min(seconds, key=lambda threads: seconds[threads])


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first index at which two unequal sequences differ."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
