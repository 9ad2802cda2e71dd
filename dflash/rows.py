"""Caches of several sequences at once, each at its own length: the target's and the drafter's.

Everything is allocated once, for the longest sequence that can come. Position ``p`` of a row is its
token ``p``; a row goes back to a shorter length by an index alone: what lies behind it is hidden
from every query and overwritten by the next tokens.

Legend: b rows, C new tokens, P prompt tokens, Q block slots, H hidden, F features, V vocabulary,
g key heads of the drafter, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.attention import attend
from dflash.decode import DecodeTarget
from dflash.drafter import Drafter, DrafterLayer
from dflash.lean import LeanCache, LeanDecoder

__all__ = ["DraftRows", "EachRow", "LeanRows", "TargetRows", "target_rows"]


class TargetRows(Protocol):
    """The target's side: prompts in, then blocks."""

    def prefill(self, row: int, ids: Sequence[int], taps: bool) -> tuple[Tensor, Tensor | None]:
        """Put a prompt into a row: ``(logits_1V of its last token, context_1PF)``."""

    def step(
        self, ids_bC: Tensor, starts_b: Tensor, starts: Sequence[int], reach: int, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens behind the first ``starts`` of each row: ``(logits_bCV, context_bCF)``."""

    def move(self, source: int, row: int) -> None:
        """Copy one row over another."""


def target_rows(target: DecodeTarget, rows: int, max_len: int) -> TargetRows:
    """Caches for ``rows`` sequences of up to ``max_len`` tokens."""
    lean = getattr(target, "lean", None)
    if lean is None:
        return EachRow(target, rows, max_len)
    return LeanRows(target, lean, rows, max_len)


class LeanRows:
    """All rows in one forward of the lean decoder."""

    def __init__(self, target: DecodeTarget, lean: LeanDecoder, rows: int, max_len: int) -> None:
        self._target = target
        self._lean = lean
        self._cache: LeanCache = lean.new_cache(rows, max_len)
        self._views = {rows: self._cache}

    def prefill(self, row: int, ids: Sequence[int], taps: bool) -> tuple[Tensor, Tensor | None]:
        ids_1P = torch.tensor([list(ids)], device=self._target.device)
        wanted = self._target.layer_ids if taps else ()
        view = self._cache.rows(row, row + 1)
        hidden_1PH, tapped = self._lean.run(ids_1P, 0, view, wanted)
        return self._target.head(hidden_1PH[:, -1]), _context(tapped, wanted)

    def step(
        self, ids_bC: Tensor, starts_b: Tensor, starts: Sequence[int], reach: int, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = ids_bC.shape[0]
        if rows not in self._views:
            self._views[rows] = self._cache.rows(0, rows)
        wanted = self._target.layer_ids if taps else ()
        hidden_bCH, tapped = self._lean.run(
            ids_bC, starts_b, self._views[rows], wanted, reach=reach
        )
        return self._target.head(hidden_bCH), _context(tapped, wanted)

    def move(self, source: int, row: int) -> None:
        self._cache.move(source, row)


class EachRow:
    """Row after row, for models that only transformers can run: one cache each, cropped."""

    def __init__(self, target: DecodeTarget, rows: int, max_len: int) -> None:
        self._target = target
        self._max_len = max_len
        self._caches: list[Any] = [None] * rows

    def prefill(self, row: int, ids: Sequence[int], taps: bool) -> tuple[Tensor, Tensor | None]:
        self._caches[row] = self._target.new_cache(self._max_len)
        ids_1P = torch.tensor([list(ids)], device=self._target.device)
        logits_1PV, context_1PF = self._target.step(ids_1P, self._caches[row], taps=taps)
        return logits_1PV[:, -1], context_1PF

    def step(
        self, ids_bC: Tensor, starts_b: Tensor, starts: Sequence[int], reach: int, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        found = []
        for row, start in enumerate(starts):
            self._caches[row].crop(start)
            found.append(self._target.step(ids_bC[row : row + 1], self._caches[row], taps=taps))
        logits_bCV = torch.cat([logits for logits, _ in found])
        contexts = [context for _, context in found if context is not None]
        return logits_bCV, torch.cat(contexts) if contexts else None

    def move(self, source: int, row: int) -> None:
        self._caches[row], self._caches[source] = self._caches[source], self._caches[row]


class DraftRows:
    """The drafter's caches, and its forward over one block of every row.

    The drafter's keys of a row are its context's up to the anchor, then the block's own.
    """

    def __init__(self, drafter: Drafter, rows: int, max_len: int) -> None:
        config, weight = drafter.config, drafter.norm.weight
        shape = (rows, config.num_key_value_heads, max_len, config.head_dim)
        self._drafter = drafter
        self._layers = [layer for layer in drafter.layers if isinstance(layer, DrafterLayer)]
        self._keys, self._values = (
            [torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in self._layers]
            for _ in "kv"
        )

    def append(self, context_bCF: Tensor, starts_b: Tensor, first_row: int = 0) -> None:
        """Keys and values of the features of positions ``starts`` and on, for good.

        Features of rejected tokens may be among them: they lie behind the row's next anchor,
        where the next block goes.
        """
        context_bCH = self._drafter.fuse_context(context_bCF)
        positions_bC = _positions(starts_b, context_bCF.shape[1])
        rope = self._drafter.rope(positions_bC)
        for number, layer in enumerate(self._layers):
            k_bgCD, v_bgCD = layer.self_attn.keys_values(context_bCH, *rope)
            self._write(number, k_bgCD, v_bgCD, positions_bC, first_row)

    def draft(self, block_embeds_bQH: Tensor, starts_b: Tensor, reach: int) -> Tensor:
        """States ``[b, Q, H]`` after the final norm of the blocks at positions ``starts``."""
        rows, slots = block_embeds_bQH.shape[:2]
        positions_bQ = _positions(starts_b, slots)
        rope = self._drafter.rope(positions_bQ)
        keys_S = torch.arange(reach, device=starts_b.device)
        seen_b11S = (keys_S < (starts_b + slots).unsqueeze(1))[:, None, None]
        x_bQH = self._drafter.as_input(block_embeds_bQH)
        for number, layer in enumerate(self._layers):
            attention, normed_bQH = layer.self_attn, layer.input_layernorm(x_bQH)
            k_bgQD, v_bgQD = attention.keys_values(normed_bQH, *rope)
            self._write(number, k_bgQD, v_bgQD, positions_bQ, 0)
            attended = attend(
                attention.queries(normed_bQH, *rope),
                self._keys[number][:rows, :, :reach],
                self._values[number][:rows, :, :reach],
                seen_b11S,
                "sdpa",
            )
            x_bQH = layer.finish(x_bQH, attended)
        out: Tensor = self._drafter.norm(x_bQH)
        return out

    def move(self, source: int, row: int) -> None:
        """Copy one row over another."""
        for tensor in (*self._keys, *self._values):
            tensor[row].copy_(tensor[source])

    def _write(
        self, number: int, k_bgCD: Tensor, v_bgCD: Tensor, positions_bC: Tensor, first_row: int
    ) -> None:
        rows_b1 = torch.arange(len(positions_bC), device=positions_bC.device).unsqueeze(1)
        rows_b1 = rows_b1 + first_row
        self._keys[number][rows_b1, :, positions_bC] = k_bgCD.transpose(1, 2)
        self._values[number][rows_b1, :, positions_bC] = v_bgCD.transpose(1, 2)


def _positions(starts_b: Tensor, count: int) -> Tensor:
    return starts_b.unsqueeze(1) + torch.arange(count, device=starts_b.device)


def _context(tapped: dict[int, Tensor], layer_ids: Sequence[int]) -> Tensor | None:
    return torch.cat([tapped[layer] for layer in layer_ids], dim=-1) if layer_ids else None
