"""The target writes responses: greedy, many prompts at once, each as if it were alone.

Which prompts share a batch is fixed by `plan_batches`, and a batch's responses depend on nothing
but the batch; so any number of workers can share the batches and the text is the same.

Legend: b rows still writing, C new tokens, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.errors import GenerationError
from dflash.lean import LeanCache, LeanDecoder
from dflash.target import Target

__all__ = ["Written", "plan_batches", "respond", "respond_batch"]

# Prompt tokens (padding included) that go through the target at once.
_PREFILL_TOKENS = 16384

# The cache grows by this many positions, since most responses end long before their limit.
_GROWTH = 256

# Finished rows are dropped when they are this part of a batch: a drop copies the whole cache.
_DROP_SHARE = 0.125

# Steps between two calls of `progress` when no prompt is finished.
_REPORT_STEPS = 16


@dataclass(frozen=True)
class Written:
    """How far a call of `respond` has come."""

    prompts: int
    """Prompts whose response is complete."""
    tokens: int
    """Response tokens, those of unfinished responses included."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def plan_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of every batch, of near-equal lengths, the longest first.

    Raises GenerationError for a batch size below 1.
    """
    if batch_size < 1:
        raise GenerationError(f"the batch size of responses is {batch_size}; it must be >= 1")
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def respond(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 64,
    progress: Callable[[Written], None] | None = None,
    stop_ids: Collection[int] | None = None,
) -> list[list[int]]:
    """The target's greedy response to each prompt, in the prompts' order.

    A response ends with the first of ``stop_ids`` (by default the target's end tokens), which is
    kept, or after ``max_new_tokens``. ``progress`` is told now and then, and at the end, what all
    batches so far have written. Raises GenerationError for an empty prompt or a limit below 1.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    begun, tokens, finished = time.perf_counter(), 0, 0

    def tell(prompts_more: int, tokens_more: int) -> None:
        if progress is not None:
            seconds = time.perf_counter() - begun
            progress(Written(finished + prompts_more, tokens + tokens_more, seconds))

    for batch in plan_batches(prompts, batch_size):
        texts = respond_batch(
            target, [prompts[index] for index in batch], max_new_tokens, tell, stop_ids
        )
        for index, text in zip(batch, texts, strict=True):
            responses[index] = text
        finished, tokens = finished + len(batch), tokens + sum(len(text) for text in texts)
    return responses


@torch.no_grad()
def respond_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    tell: Callable[[int, int], None] | None = None,
    stop_ids: Collection[int] | None = None,
) -> list[list[int]]:
    """The responses to one batch, all written at the same time; see `respond`.

    ``tell(prompts, tokens)`` hears how much of this batch is written.
    """
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens is {max_new_tokens}; it must be >= 1")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise GenerationError(f"prompt {number} of the batch is empty; it needs a token")
    stops = torch.tensor(
        sorted(target.spec.eos_ids if stop_ids is None else stop_ids),
        dtype=torch.long,
        device=target.device,
    )
    rows: _Rows = (
        _HfRows(target) if target.lean is None else _LeanRows(target, target.lean, max_new_tokens)
    )
    written = [[] for _ in prompts]  # type: list[list[int]]
    alive = torch.arange(len(prompts), device=target.device)
    done_b = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    next_b = target.head(rows.read(prompts)).argmax(dim=-1)
    finished = tokens = 0
    for step in range(1, max_new_tokens + 1):
        ended_b = torch.isin(next_b, stops) & ~done_b
        columns = zip(alive.tolist(), next_b.tolist(), done_b.tolist(), strict=True)
        for row, token, done in columns:
            if not done:
                written[row].append(token)
                tokens += 1
        done_b |= ended_b
        more = int(ended_b.sum())
        finished += more
        if finished == len(prompts) or step == max_new_tokens:
            break
        if tell is not None and (more or step % _REPORT_STEPS == 0):
            tell(finished, tokens)
        if int(done_b.sum()) >= _DROP_SHARE * len(done_b):
            kept = (~done_b).nonzero()[:, 0]
            rows.keep(kept)
            alive, next_b, done_b = alive[kept], next_b[kept], done_b[kept]
        next_b = target.head(rows.append(next_b)).argmax(dim=-1)
    if tell is not None:
        tell(len(prompts), tokens)
    return written


class _Rows(Protocol):
    """Sequences that grow by a token at a time; states are after the final norm, ``[b, H]``."""

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Take the prompts in: the state of each one's last token."""

    def append(self, tokens_b: Tensor) -> Tensor:
        """One more token per row: its state."""

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only."""


class _LeanRows:
    """Rows of the lean decoder: every row at its own position, nothing padded after the prompt."""

    def __init__(self, target: Target, lean: LeanDecoder, max_new_tokens: int) -> None:
        self._lean = lean
        self._device = target.device
        self._pad = target.spec.pad_id
        self._limit = max_new_tokens
        self._cache: LeanCache
        self._lengths_b: Tensor
        self._longest = 0

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(prompt) for prompt in prompts]
        self._lengths_b = torch.tensor(lengths, device=self._device)
        self._longest = max(lengths)
        self._cache = self._lean.new_cache(len(prompts), self._longest + min(self._limit, _GROWTH))
        states = []
        group = max(1, _PREFILL_TOKENS // self._longest)
        for start in range(0, len(prompts), group):
            part = prompts[start : start + group]
            part_lengths_b = self._lengths_b[start : start + group]
            # Padding follows the prompt: no token sees it, and the response overwrites it.
            ids_bP = _padded(part, self._pad, left=False).to(self._device)
            part_cache = self._cache.rows(start, start + len(part))
            hidden_bPH, _ = self._lean.run(ids_bP, 0, part_cache)
            states.append(hidden_bPH[torch.arange(len(part)), part_lengths_b - 1])
        return torch.cat(states)

    def append(self, tokens_b: Tensor) -> Tensor:
        if self._longest == self._cache.max_len:
            self._cache.grow(_GROWTH)
        hidden_b1H, _ = self._lean.run(tokens_b.unsqueeze(1), self._lengths_b, self._cache)
        self._lengths_b = self._lengths_b + 1
        self._longest += 1
        return hidden_b1H[:, 0]

    def keep(self, rows: Tensor) -> None:
        self._cache.select(rows)
        self._lengths_b = self._lengths_b[rows]
        self._longest = int(self._lengths_b.max())


class _HfRows:
    """Rows of any model that transformers can run: padded on the left, positions counted behind."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache: Any = target.hf_cache()
        self._seen_bS: Tensor

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = self._target.device
        lengths_b = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids_bP = _padded(prompts, self._target.spec.pad_id, left=True).to(device)
        columns_P = torch.arange(ids_bP.shape[1], device=device)
        self._seen_bS = (columns_P >= ids_bP.shape[1] - lengths_b.unsqueeze(1)).long()
        return self._run(ids_bP)

    def append(self, tokens_b: Tensor) -> Tensor:
        self._seen_bS = torch.cat([self._seen_bS, torch.ones_like(self._seen_bS[:, :1])], dim=1)
        return self._run(tokens_b.unsqueeze(1))

    def keep(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._seen_bS = self._seen_bS[rows]

    def _run(self, ids_bC: Tensor) -> Tensor:
        positions_bS = (self._seen_bS.cumsum(dim=1) - 1).clamp(min=0)
        hidden_bCH = self._target.hf_run(
            ids_bC,
            self._cache,
            attention_mask=self._seen_bS,
            position_ids=positions_bS[:, -ids_bC.shape[1] :],
        )
        return hidden_bCH[:, -1]


def _padded(prompts: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> Tensor:
    """Prompts as one int64 tensor ``[b, P]``."""
    width = max(len(prompt) for prompt in prompts)
    ids_bP = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if left else 0
        ids_bP[row, start : start + len(prompt)] = torch.tensor(list(prompt))
    return ids_bP
