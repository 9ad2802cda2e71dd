"""One drafter thread's copy: weights, gradient, optimizer. All copies stay equal to the last bit.

Legend: P all parameters (flat), K sums of the loss, B block size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.config import OptimSettings
from dflash.drafter import Drafter
from dflash.errors import CheckpointError, DFlashError
from dflash.feature_store import Batch
from dflash.flat import FlatParameters
from dflash.step import Frozen, LossTerms, SumLayout, draft_sums


class TrainingDiverged(DFlashError):
    """The loss or the gradient is not finite."""


@dataclass(frozen=True)
class StepResult:
    """What a step says about itself, over all drafters."""

    loss: float
    ce: float
    kl: float
    accuracy: tuple[float, ...]
    """Right predictions of slots 1..B-1 of all supervised ones (nan where there are none)."""
    acceptance: float
    """Teacher-forced: 1 + leading right predictions per block, as decoding counts them."""
    blocks: int
    tokens: int
    """Context tokens read."""
    dropped: int
    grad_norm: float


class Replica:
    """Use per step: `begin`, `run` for each batch, the exchange on `flat.grads_P` and `sums_K`,
    `update`. `completed` counts the updates; it and the weights change together.
    """

    def __init__(
        self, drafter: Drafter, frozen: Frozen, terms: LossTerms, optim: OptimSettings
    ) -> None:
        self.drafter = drafter
        self.flat = FlatParameters(drafter)
        self.device = self.flat.values_P.device
        self.layout = SumLayout(drafter.config.block_size)
        self.sums_K = torch.zeros(self.layout.size, dtype=torch.float64, device=self.device)
        self.completed = 0
        self._frozen = frozen
        self._terms = terms
        self._clip = optim.clip
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [self.flat.matrices], "weight_decay": optim.weight_decay},
                {"params": [self.flat.vectors], "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            fused=True,
        )

    def warm_up(self, lengths: Sequence[int], batch: int) -> None:
        """Compile forward and backward for every padded length, leaving no trace in the state."""
        width = self.drafter.config.feature_size
        hidden = self.drafter.config.hidden_size
        rows_R = self._frozen.rows_R
        token = 0 if rows_R is None else int(rows_R[0])  # one that may be a label
        for length in lengths:
            # Features of the dtype and the mask of the shape that real batches have.
            self.run(
                Batch(
                    number=-1,
                    anchor_seed=0,
                    ids_bS=torch.full((batch, length), token, device=self.device),
                    loss_mask_bS=torch.ones(batch, length, dtype=torch.bool, device=self.device),
                    lengths_b=torch.full((batch,), length, device=self.device),
                    context_bSF=torch.zeros(batch, length, width, device=self.device),
                    last_bSH=torch.zeros(batch, length, hidden, device=self.device),
                )
            )
        self.begin()

    def begin(self) -> None:
        """Forget the last step's gradient and sums."""
        self.flat.grads_P.zero_()
        self.sums_K.zero_()

    def run(self, batch: Batch) -> None:
        """Forward and backward of one batch; adds to gradient and sums."""
        numerator, sums_K = draft_sums(self.drafter, self._frozen, batch, self._terms)
        numerator.backward()  # type: ignore[no-untyped-call]
        self.sums_K += sums_K
        self.sums_K[SumLayout.DROPPED] += batch.dropped

    def update(self, lr: float) -> Tensor:
        """Divide by the weights of all drafters, clip, step. The gradient's norm, on the device."""
        grads_P = self.flat.grads_P
        # A step without any supervised slot has a zero gradient; do not make it nan.
        weight = self.sums_K[SumLayout.WEIGHT].clamp(min=1e-12)
        grads_P.div_(weight.float())
        norm: Tensor = torch.linalg.vector_norm(grads_P)
        if self._clip:
            grads_P.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.completed += 1
        return norm

    def result(self, grad_norm: Tensor) -> StepResult:
        """The figures of the step just made. TrainingDiverged if they are not finite."""
        sums = self.sums_K.tolist()
        weight = max(sums[SumLayout.WEIGHT], 1e-12)
        ce, kl = sums[SumLayout.CE] / weight, sums[SumLayout.KL] / weight
        blocks = sums[SumLayout.BLOCKS]
        hits, counts = sums[self.layout.hits], sums[self.layout.counts]
        result = StepResult(
            loss=self._terms.ce * ce + self._terms.kl * kl,
            ce=ce,
            kl=kl,
            accuracy=tuple(
                hit / count if count else math.nan for hit, count in zip(hits, counts, strict=True)
            ),
            acceptance=sums[SumLayout.ACCEPTED] / blocks if blocks else math.nan,
            blocks=round(blocks),
            tokens=round(sums[SumLayout.TOKENS]),
            dropped=round(sums[SumLayout.DROPPED]),
            grad_norm=grad_norm.item(),
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise TrainingDiverged(
                f"step {self.completed}: the loss is {result.loss} and the gradient's norm "
                f"{result.grad_norm}; lower optim.lr, or go on from the last checkpoint"
            )
        return result

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments, by name; with `completed` all that goes on from here."""
        found = {"weights": self.flat.values_P}
        for name, part in self._parts():
            state = self._optimizer.state.get(part, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{moment}"] = state.get(moment, torch.zeros_like(part)).detach()
        return found

    def load(self, tensors: Mapping[str, Tensor], *, completed: int) -> None:
        """The reverse of `tensors`. CheckpointError if they do not fit."""
        mine = {name: tensor.shape for name, tensor in self.tensors().items()}
        given = {name: tensor.shape for name, tensor in tensors.items()}
        if mine != given:
            raise CheckpointError(f"the training state holds {given}, this run needs {mine}")
        self.flat.values_P.copy_(tensors["weights"])
        for name, part in self._parts():
            self._optimizer.state[part] = {
                "step": torch.tensor(float(completed), device=self._step_device()),
                "exp_avg": tensors[f"{name}.exp_avg"].to(self.device, copy=True),
                "exp_avg_sq": tensors[f"{name}.exp_avg_sq"].to(self.device, copy=True),
            }
        self.completed = completed

    def copy_weights(self, other: Replica) -> None:
        """Start from the same weights as `other`."""
        self.flat.values_P.copy_(other.flat.values_P)

    def _parts(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [("matrices", self.flat.matrices), ("vectors", self.flat.vectors)]

    def _step_device(self) -> torch.device:
        return self.device  # fused AdamW counts steps beside the weights
