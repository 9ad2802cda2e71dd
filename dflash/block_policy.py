"""How many tokens to draft next: what a round of each width yields, against what it costs.

A wide block costs more to draft and to verify, and is worth it only while its later slots are
accepted. The policy learns both while it decodes: acceptance of each slot from the rounds' results,
and seconds of each width from the clock. The best width has the most tokens a second; where that is
1, decoding goes on without the drafter and asks it again after ever longer spans.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BlockPolicy"]

# Weight of the past, per round: about the last twenty rounds count.
_MEMORY = 0.95

# Rounds of a width before its time counts: the first ones compile, load and measure nothing.
_WARM_UP = 1

# Of a width's seconds, the weight of the newest round.
_NEWEST = 0.2

# Steps without the drafter before it is asked again; doubled each time it is still not worth it.
_FIRST_SPAN, _LONGEST_SPAN = 16, 512


class BlockPolicy:
    """Chooses a width for each round: 1 (no draft), 2, 4, … and ``block_size``."""

    def __init__(self, block_size: int, *, adaptive: bool) -> None:
        halves = [block_size]
        while adaptive and halves[-1] > 2:
            halves.append(max(2, halves[-1] // 2))
        self.widths = tuple(sorted({1, *halves})) if adaptive else (block_size,)
        self._block_size = block_size
        self._adaptive = adaptive and block_size > 1
        # Slot k (from 1) was accepted so often, of so often that all before it were. The slots
        # begin as accepted once: a drafter is tried before it is given up.
        self._hits = [1.0] * block_size
        self._tries = [1.0] * block_size
        self._rounds = dict.fromkeys(self.widths, 0)
        self._seconds: dict[int, float] = {}
        self._plain_left = 0
        self._asleep = False
        self._again = 0
        self._span = _FIRST_SPAN

    def next(self) -> int:
        """The width of the next round."""
        if not self._adaptive:
            return self._block_size
        for width in (self._block_size, 1):  # both ends of the scale are measured first
            if width not in self._seconds:
                return width
        best = max(self.widths, key=self.rate)
        if best != 1 or self._again:
            return best if best != 1 else self._again
        if self._plain_left > 0:
            self._plain_left -= 1
            return 1
        if self._asleep:  # the span is over: one round of the best block
            self._asleep = False
            return max(self.widths[1:], key=self.rate)
        self._asleep = True
        self._plain_left, self._span = self._span - 1, min(2 * self._span, _LONGEST_SPAN)
        return 1

    def record(self, width: int, accept_lengths: Sequence[int], seconds: float) -> None:
        """A round of ``width`` took ``seconds`` and gave each row so many tokens."""
        for length in accept_lengths if width > 1 else ():
            for slot in range(1, min(length + 1, width)):
                self._tries[slot] = self._tries[slot] * _MEMORY + 1
                self._hits[slot] = self._hits[slot] * _MEMORY + (slot < length)
        if not self._adaptive:
            return
        self._rounds[width] += 1
        if self._rounds[width] > _WARM_UP:
            before = self._seconds.get(width, seconds)
            self._seconds[width] = before + _NEWEST * (seconds - before)
        if width == 1 or not self._measured:
            return
        if self.rate(width) > self.rate(1):
            self._span = _FIRST_SPAN
        # One good round does not make a good average, but it may be the first of many.
        worth = sum(accept_lengths) / len(accept_lengths) / self._cost(width) > self.rate(1)
        self._again = width if worth else 0

    def rate(self, width: int) -> float:
        """Tokens per second that a round of ``width`` is expected to give a row."""
        return self.expected(width) / self._cost(width)

    def expected(self, width: int) -> float:
        """Tokens that a round of ``width`` is expected to give a row, 1..width."""
        tokens = run = 1.0
        for slot in range(1, width):
            run *= self._hits[slot] / self._tries[slot]
            tokens += run
        return tokens

    @property
    def _measured(self) -> bool:
        return {1, self._block_size} <= set(self._seconds)

    def _cost(self, width: int) -> float:
        """Seconds of a round; one never timed lies on the line between its neighbours."""
        if width in self._seconds:
            return max(self._seconds[width], 1e-9)
        low = max(w for w in self._seconds if w < width)
        high = min(w for w in self._seconds if w > width)
        part = (width - low) / (high - low)
        return max(self._seconds[low] * (1 - part) + self._seconds[high] * part, 1e-9)
