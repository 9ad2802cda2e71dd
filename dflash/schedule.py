"""Which sequences every drafter sees at every step: a pure function of the seed and the lengths.

Nothing here depends on the number of target workers, on timing, or on how far a run has come, so
one worker or five, interrupted or not, train on the same batches in the same order.

A *round* is one batch for each drafter, all of one padded length, so that drafters that wait for
each other at the end of a step have the same work. A step is `accumulate` rounds.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Microbatch:
    """One drafter's batch: sequence indices (fewer than the batch size at an epoch's end)."""

    number: int
    """Position in the order of hand-over over the whole run, all drafters."""
    indices: tuple[int, ...]
    length: int
    """Padded sequence length."""
    anchor_seed: int


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from values, the same in every process and on every machine."""
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def choose_buckets(lengths: Sequence[int], *, multiple: int, count: int) -> tuple[int, ...]:
    """At most `count` padded lengths, multiples of `multiple`, that waste the fewest tokens.

    Ascending; the last holds the longest sequence. Dynamic programming over the distinct rounded
    lengths: O(distinct**2 * count).
    """
    rounded = [max(1, math.ceil(length / multiple)) * multiple for length in lengths]
    sizes = sorted(set(rounded))
    at_most = [sum(1 for r in rounded if r <= size) for size in sizes]
    best: list[tuple[int, tuple[int, ...]]] = [
        (at_most[j] * size, (size,)) for j, size in enumerate(sizes)
    ]
    for _ in range(min(count, len(sizes)) - 1):
        best = [
            min(
                [best[j]]
                + [
                    (best[i][0] + (at_most[j] - at_most[i]) * size, (*best[i][1], size))
                    for i in range(j)
                ]
            )
            for j, size in enumerate(sizes)
        ]
    return best[-1][1]


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`."""
    return next(bucket for bucket in buckets if bucket >= length)


def feature_groups(lengths: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Fixed groups of sequences of like length, for the target to read `size` at once."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))


class Schedule:
    """The microbatches of a run.

    `lengths` are the sequences' own lengths; `buckets` from `choose_buckets`. Sequences are
    shuffled inside their bucket every epoch; what does not fill a round there joins the next
    larger bucket, and the last round of an epoch may be short. Each epoch visits each sequence
    exactly once.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        buckets: Sequence[int],
        seed: int,
        batch: int,
        drafters: int,
        accumulate: int,
        epochs: float,
        steps: int,
    ) -> None:
        self.buckets = tuple(buckets)
        self.drafters = drafters
        self.accumulate = accumulate
        self._batch = batch
        self._seed = seed
        self._members = {
            bucket: [i for i, length in enumerate(lengths) if bucket_of(length, buckets) == bucket]
            for bucket in buckets
        }
        per_round = batch * drafters
        self.rounds_per_epoch = math.ceil(len(lengths) / per_round)
        self.steps = steps or max(1, math.ceil(epochs * self.rounds_per_epoch / accumulate))
        self.fingerprint = hashlib.blake2b(
            repr(
                (list(lengths), self.buckets, seed, batch, drafters, accumulate, self.steps)
            ).encode(),
            digest_size=8,
        ).hexdigest()
        """Equal for two runs that would see the same batches."""
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    @property
    def per_step(self) -> int:
        """Microbatches of one step, all drafters."""
        return self.accumulate * self.drafters

    @property
    def total(self) -> int:
        """Microbatches of the whole run."""
        return self.steps * self.per_step

    def microbatch(self, number: int) -> Microbatch:
        """The number-th in the order (step, round, drafter)."""
        round_number, rank = divmod(number, self.drafters)
        epoch, index = divmod(round_number, self.rounds_per_epoch)
        length, indices = self._epoch(epoch)[index]
        return Microbatch(
            number=number,
            indices=indices[rank :: self.drafters],
            length=length,
            anchor_seed=stable_seed(self._seed, "anchors", number),
        )

    def _make_epoch(self, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        shuffle = random.Random(stable_seed(self._seed, "order", epoch)).shuffle
        per_round = self._batch * self.drafters
        rounds: list[tuple[int, tuple[int, ...]]] = []
        left: list[int] = []
        for bucket in self.buckets:
            here = left + self._members[bucket]
            shuffle(here)
            full = len(here) // per_round * per_round
            rounds += [(bucket, tuple(here[i : i + per_round])) for i in range(0, full, per_round)]
            left = here[full:]
        if left:
            rounds.append((self.buckets[-1], tuple(left)))
        shuffle(rounds)
        return rounds


def learning_rate(
    step: int, total: int, *, peak: float, warmup: float, schedule: str, minimum: float
) -> float:
    """The rate of a step (0-based): a linear warm-up over `warmup * total` steps, then the decay.

    `minimum` is a part of the peak, reached at the last step.
    """
    warm = round(warmup * total)
    if step < warm:
        return peak * (step + 1) / warm
    if schedule == "constant":
        return peak
    done = (step - warm) / max(1, total - 1 - warm)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    return peak * (minimum + (1 - minimum) * left)
