"""Batches of hidden states: computed once and kept, or computed anew for every batch.

Kept features are always computed in the same fixed groups, whoever asks first, and cut out of
them row by row; computed-anew features belong to a batch that the schedule fixed. Either way the
values depend neither on the number of target workers nor on their timing.

Legend: b batch, S padded length, L a sequence's own length, F = T * H features, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash.schedule import Microbatch
from dflash.workers import SingleFlight, StopSignal


class Sequences(Protocol):
    """What the store reads of a training example."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[bool] | Sequence[int]: ...


class FeatureSource(Protocol):
    """What the store asks of a target."""

    @property
    def device(self) -> torch.device: ...

    def features(
        self, ids_bS: Tensor, lengths_b: Tensor, *, last_hidden: bool
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass
class Batch:
    """What a drafter trains on. Rows that only fill the batch up have length 0."""

    number: int
    anchor_seed: int
    ids_bS: Tensor
    loss_mask_bS: Tensor
    lengths_b: Tensor
    context_bSF: Tensor
    last_bSH: Tensor | None
    """Hidden states after the final norm, for distillation."""
    dropped: int = 0
    """Sequences left out because the target's hidden states were not finite."""
    ready: torch.cuda.Event | None = None

    def tensors(self) -> list[Tensor]:
        always = [self.ids_bS, self.loss_mask_bS, self.lengths_b, self.context_bSF]
        return always if self.last_bSH is None else [*always, self.last_bSH]

    def send(self, device: torch.device) -> Batch:
        """The batch on the drafter's device, on the way there if that is a GPU."""
        last = None if self.last_bSH is None else self.last_bSH.to(device, non_blocking=True)
        sent = Batch(
            number=self.number,
            anchor_seed=self.anchor_seed,
            ids_bS=self.ids_bS.to(device, non_blocking=True),
            loss_mask_bS=self.loss_mask_bS.to(device, non_blocking=True),
            lengths_b=self.lengths_b.to(device, non_blocking=True),
            context_bSF=self.context_bSF.to(device, non_blocking=True),
            last_bSH=last,
            dropped=self.dropped,
        )
        if device.type == "cuda":
            sent.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.ready.record(torch.cuda.current_stream(device))
        return sent

    def receive(self) -> Batch:
        """Called by the consumer before the first use: its stream waits for the copies.

        The tensors belong to the producer's stream; without record_stream their memory would be
        reused there while this stream still reads them.
        """
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.context_bSF.device)
            stream.wait_event(self.ready)
            for tensor in self.tensors():
                tensor.record_stream(stream)
        return self


@dataclass(frozen=True)
class _Row:
    context_LF: Tensor
    last_LH: Tensor | None
    finite: bool


class FeatureStore:
    """Makes the batches of a run from its sequences.

    With `keep` the features of every group of `groups` are computed when first needed and stay in
    main memory (pinned if a GPU will read them); without it they are computed for every batch.
    """

    def __init__(
        self,
        examples: Sequence[Sequences],
        groups: Sequence[Sequence[int]],
        *,
        batch: int,
        pad_id: int,
        last_hidden: bool,
        keep: bool,
        pin: bool,
        stop: StopSignal,
    ) -> None:
        self._examples = examples
        self._groups = groups
        self._group_of = {index: g for g, group in enumerate(groups) for index in group}
        self._batch = batch
        self._pad_id = pad_id
        self._last_hidden = last_hidden
        self._keep = keep
        self._pin = pin
        self._rows: SingleFlight[int, dict[int, _Row]] = SingleFlight(stop)

    @property
    def keeps(self) -> bool:
        """Whether features stay."""
        return self._keep

    def batch(self, micro: Microbatch, target: FeatureSource) -> Batch:
        """The batch of `micro` (not an empty one): in main memory if kept, else on the device."""
        if self._keep:
            return self._from_rows(micro, target)
        return self._anew(micro, target)

    def group(self, number: int, target: FeatureSource) -> dict[int, Tensor | None]:
        """Last hidden states `[L, H]` by sequence of one fixed group (kept if the store keeps)."""
        rows = self._group_rows(number, target) if self._keep else self._compute(number, target)
        return {index: row.last_LH if row.finite else None for index, row in rows.items()}

    def _from_rows(self, micro: Microbatch, target: FeatureSource) -> Batch:
        rows = {
            index: self._group_rows(self._group_of[index], target)[index] for index in micro.indices
        }
        ids_bS, mask_bS, lengths_b = self._tokens(micro.indices, micro.length, self._batch)
        some = next(iter(rows.values()))
        context_bSF = self._room(some.context_LF, micro.length)
        last_bSH = None if some.last_LH is None else self._room(some.last_LH, micro.length)
        dropped = 0
        for b, row in enumerate(rows.values()):
            if not row.finite:
                dropped += 1
                mask_bS[b] = False
                continue
            context_bSF[b, : len(row.context_LF)] = row.context_LF
            if last_bSH is not None and row.last_LH is not None:
                last_bSH[b, : len(row.last_LH)] = row.last_LH
        return Batch(
            micro.number,
            micro.anchor_seed,
            ids_bS,
            mask_bS,
            lengths_b,
            context_bSF,
            last_bSH,
            dropped,
        )

    def _anew(self, micro: Microbatch, target: FeatureSource) -> Batch:
        ids_bS, mask_bS, lengths_b = self._tokens(micro.indices, micro.length, self._batch)
        context_bSF, last_bSH = self._read(target, ids_bS, lengths_b)
        inside_bS1 = _inside(lengths_b, micro.length).unsqueeze(-1).to(context_bSF.device)
        # Padding must be finite, not only masked: 0 * nan is nan in the attention's sum.
        context_bSF = context_bSF.masked_fill(~inside_bS1, 0.0)
        finite_b = context_bSF.isfinite().flatten(1).all(dim=1)
        if last_bSH is not None:
            last_bSH = last_bSH.masked_fill(~inside_bS1, 0.0)
            finite_b = finite_b & last_bSH.isfinite().flatten(1).all(dim=1)
        dropped = int((~finite_b).sum())
        if dropped:
            lost_b11 = ~finite_b[:, None, None]
            context_bSF = context_bSF.masked_fill(lost_b11, 0.0)
            last_bSH = None if last_bSH is None else last_bSH.masked_fill(lost_b11, 0.0)
            mask_bS[~finite_b.cpu()] = False
        return Batch(
            micro.number,
            micro.anchor_seed,
            ids_bS,
            mask_bS,
            lengths_b,
            context_bSF,
            last_bSH,
            dropped,
        )

    def _group_rows(self, number: int, target: FeatureSource) -> dict[int, _Row]:
        return self._rows.get(number, lambda: self._compute(number, target))

    def _compute(self, number: int, target: FeatureSource) -> dict[int, _Row]:
        group = self._groups[number]
        length = max(len(self._examples[index].ids) for index in group)
        ids_bS, _, lengths_b = self._tokens(group, length, len(group))
        context_bSF, last_bSH = self._read(target, ids_bS, lengths_b)
        rows = {}
        for b, index in enumerate(group):
            own = len(self._examples[index].ids)
            context_LF = self._store(context_bSF[b, :own])
            last_LH = None if last_bSH is None else self._store(last_bSH[b, :own])
            finite = bool(context_LF.isfinite().all()) and (
                last_LH is None or bool(last_LH.isfinite().all())
            )
            rows[index] = _Row(context_LF, last_LH, finite)
        return rows

    def _read(
        self, target: FeatureSource, ids_bS: Tensor, lengths_b: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        device = target.device
        # A row that only fills up still needs one position, or its attention has nothing to read.
        some_b = lengths_b.clamp(min=1)
        return target.features(ids_bS.to(device), some_b.to(device), last_hidden=self._last_hidden)

    def _tokens(
        self, indices: Sequence[int], length: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids_bS = torch.full((rows, length), self._pad_id, dtype=torch.long)
        mask_bS = torch.zeros((rows, length), dtype=torch.bool)
        lengths_b = torch.zeros(rows, dtype=torch.long)
        for b, index in enumerate(indices):
            example = self._examples[index]
            own = len(example.ids)
            ids_bS[b, :own] = torch.tensor(example.ids, dtype=torch.long)
            mask_bS[b, :own] = torch.tensor(example.loss_mask, dtype=torch.bool)
            lengths_b[b] = own
        return ids_bS, mask_bS, lengths_b

    def _room(self, like_LX: Tensor, length: int) -> Tensor:
        shape = (self._batch, length, like_LX.shape[-1])
        return torch.zeros(shape, dtype=like_LX.dtype, pin_memory=self._pin)

    @staticmethod
    def _store(rows_LX: Tensor) -> Tensor:
        # A copy, so that the padded group can be freed.
        return rows_LX.to("cpu", copy=True)


def feature_bytes(
    lengths: Sequence[int], *, feature_size: int, hidden_size: int, item: int, last_hidden: bool
) -> int:
    """Main memory that keeping all features takes."""
    width = feature_size + (hidden_size if last_hidden else 0)
    return sum(lengths) * width * item


def _inside(lengths_b: Tensor, length: int) -> Tensor:
    return torch.arange(length) < lengths_b.unsqueeze(1)
