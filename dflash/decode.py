"""Greedy decoding of one sequence: with the target alone, and with a drafter (paper 3, T = 0).

Both give the same tokens: the drafter only proposes, each kept token is the target's own argmax.

Legend: C new tokens, B block size, F features, V vocabulary; batch is always 1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.acceptance import accepted_length
from dflash.drafter import DraftCache, Drafter
from dflash.errors import GenerationError

__all__ = ["CacheLike", "DecodeTarget", "Generation", "check_drafter", "greedy", "speculative"]


class CacheLike(Protocol):
    """The target's key/value cache: a length, and a way to forget the newest tokens."""

    @property
    def length(self) -> int: ...

    def crop(self, length: int) -> None: ...


class DecodeTarget(Protocol):
    """What decoding needs of a target; ``dflash.target.Target`` has it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    def embed(self, ids: Tensor) -> Tensor: ...

    def head(self, hidden: Tensor) -> Tensor: ...

    def new_cache(self, max_len: int) -> Any: ...

    def step(self, ids_1C: Tensor, cache: Any, *, taps: bool) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Generation:
    """What was written, and what it took."""

    ids: list[int]
    """New tokens, the stop token included if one was met."""
    seconds: float
    """Wall time of everything, the prompt's forward included."""
    calls: int
    """Forward passes of the target, the prompt's included."""
    prefill_seconds: float = 0.0
    """The prompt's share of ``seconds``."""
    accept_lengths: list[int] = field(default_factory=list)
    """Accepted draft tokens + 1 of each verified block (empty without a drafter)."""


@torch.no_grad()
def greedy(
    target: DecodeTarget,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Decode with the target alone, one token a call.

    Ends after ``max_new_tokens`` or with the first token of ``stop_ids``, which is kept. Raises
    GenerationError for an empty prompt or a limit below 1.
    """
    _check_request(prompt_ids, max_new_tokens)
    clock = _Clock(target.device)
    cache = target.new_cache(len(prompt_ids) + max_new_tokens)
    logits_1CV, _ = target.step(_row(prompt_ids, target), cache, taps=False)
    ids = [int(logits_1CV[0, -1].argmax())]
    prefill_seconds = clock.elapsed()
    calls = 1
    while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
        logits_1CV, _ = target.step(_row(ids[-1:], target), cache, taps=False)
        ids.append(int(logits_1CV[0, -1].argmax()))
        calls += 1
    return Generation(ids, clock.elapsed(), calls, prefill_seconds)


@torch.no_grad()
def speculative(
    target: DecodeTarget,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    block_size: int | None = None,
) -> Generation:
    """Decode with a drafter: it fills a block, the target checks the block in one call.

    The tokens are those of ``greedy`` (up to near-ties that the target's own arithmetic decides
    otherwise for a block than for a token; in float32 hardly ever). ``block_size`` may be
    smaller than the trained one. A round past the limit or a stop token counts in full in
    ``accept_lengths``. Raises GenerationError for an impossible request or a foreign drafter.
    """
    _check_request(prompt_ids, max_new_tokens)
    width = check_drafter(target, drafter, block_size)
    clock = _Clock(target.device)
    start = len(prompt_ids)
    # The last block may begin one token before the limit and is verified whole.
    target_cache = target.new_cache(start + max_new_tokens + width)
    draft_cache = drafter.new_cache(start + max_new_tokens + width)
    logits_1CV, context_1CF = target.step(_row(prompt_ids, target), target_cache, taps=True)
    ids = [int(logits_1CV[0, -1].argmax())]
    prefill_seconds = clock.elapsed()
    calls, accept_lengths = 1, []
    while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
        # ids[-1] is the anchor: its token is known, its feature is not, the target has not run it.
        drafted = _draft(target, drafter, draft_cache, ids[-1], start, context_1CF, width)
        block = [ids[-1], *drafted]
        logits_1CV, verified_1BF = target.step(_row(block, target), target_cache, taps=True)
        wanted = logits_1CV[0].argmax(dim=-1).tolist()
        accepted = accepted_length(drafted, wanted)
        start += accepted + 1
        target_cache.crop(start)
        assert verified_1BF is not None
        context_1CF = verified_1BF[:, : accepted + 1]
        calls += 1
        accept_lengths.append(accepted + 1)
        if _extend(ids, wanted[: accepted + 1], max_new_tokens, stop_ids):
            break
    return Generation(ids, clock.elapsed(), calls, prefill_seconds, accept_lengths)


def _draft(
    target: DecodeTarget,
    drafter: Drafter,
    cache: DraftCache,
    anchor_id: int,
    start: int,
    new_context_1CF: Tensor | None,
    width: int,
) -> list[int]:
    """The drafter's argmax for the slots behind the anchor at position ``start``."""
    assert new_context_1CF is not None
    device = target.device
    block_ids = [anchor_id] + [drafter.config.mask_token_id] * (width - 1)
    hidden_1BH = drafter.forward_cached(
        target.embed(_row(block_ids, target)),
        new_context_1CF,
        torch.arange(cache.length, start, device=device).unsqueeze(0),
        torch.arange(start, start + width, device=device).unsqueeze(0),
        cache,
    )
    drafted: list[int] = target.head(hidden_1BH[:, 1:])[0].argmax(dim=-1).tolist()
    return drafted


def _extend(ids: list[int], new: list[int], limit: int, stop_ids: Collection[int]) -> bool:
    """Append ``new`` as plain greedy decoding would; True when that ends the response."""
    for token in new:
        ids.append(token)
        if token in stop_ids or len(ids) == limit:
            return True
    return False


def _row(ids: Sequence[int], target: DecodeTarget) -> Tensor:
    return torch.tensor([list(ids)], dtype=torch.long, device=target.device)


class _Clock:
    """Wall time that waits for the device's queued work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._now()

    def elapsed(self) -> float:
        return self._now() - self._begin

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not len(prompt_ids):
        raise GenerationError("the prompt is empty; decoding needs at least one token")
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens is {max_new_tokens}; it must be >= 1")


def check_drafter(target: DecodeTarget, drafter: Drafter, block_size: int | None) -> int:
    """The width of its blocks. GenerationError for a block or a target it was not trained for."""
    trained = drafter.config.block_size
    width = trained if block_size is None else block_size
    if not 2 <= width <= trained:
        raise GenerationError(
            f"block_size is {width}; this drafter was trained for 2..{trained} slots"
        )
    if tuple(target.layer_ids) != drafter.config.target_layer_ids:
        raise GenerationError(
            f"the target taps layers {tuple(target.layer_ids)}, but the drafter was trained on "
            f"{drafter.config.target_layer_ids}; load the target with the drafter's layer ids"
        )
    return width
