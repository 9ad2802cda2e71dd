"""Sum the drafters' gradients so that every drafter ends with the same bits.

Each drafter owns one flat gradient. Drafter r sums segment r of all of them in the order of the
ranks, then everybody copies every segment from its owner: the order of each addition is fixed,
whatever the threads' timing, and each link carries 2 * (D - 1) / D of a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.workers import Rendezvous, StopSignal


class GradientExchange:
    """An all-reduce among the drafter threads of one process."""

    def __init__(self, drafters: int, stop: StopSignal) -> None:
        self._drafters = drafters
        self._meet = Rendezvous(drafters, stop)
        self._grads: list[Tensor | None] = [None] * drafters
        self._sums: list[Tensor | None] = [None] * drafters
        self._parts: list[Tensor | None] = [None] * drafters
        self._events: list[torch.cuda.Event | None] = [None] * drafters
        self.waited = [0.0] * drafters
        """Seconds that each drafter spent waiting for the others."""

    def reduce(self, rank: int, grad_P: Tensor, sums_K: Tensor) -> None:
        """Replace both by their sums over all drafters, in place. Called once by each rank.

        `grad_P` is flat, of the same length everywhere; `sums_K` holds the loss's numerators and
        denominators. Raises Stopped when the group stops meanwhile.
        """
        if self._drafters == 1:
            return
        self._grads[rank], self._sums[rank] = grad_P, sums_K
        self._arrive(rank, grad_P)
        self._parts[rank] = self._sum_segment(rank, grad_P.device)
        total_K = self._sum_all(self._sums, sums_K.device)
        self._arrive(rank, grad_P)  # nobody overwrites its gradient before all have read it
        for owner in range(self._drafters):
            part = self._parts[owner]
            assert part is not None
            self._segment(grad_P, owner).copy_(part, non_blocking=True)
        sums_K.copy_(total_K)
        self._arrive(rank, grad_P)  # nobody frees or reuses its part before all have copied it
        self._parts[rank] = None

    def _sum_segment(self, rank: int, device: torch.device) -> Tensor:
        return self._sum_all(
            [None if grad is None else self._segment(grad, rank) for grad in self._grads], device
        )

    @staticmethod
    def _sum_all(tensors: list[Tensor | None], device: torch.device) -> Tensor:
        total: Tensor | None = None
        for tensor in tensors:
            assert tensor is not None
            here = tensor.to(device, non_blocking=True)
            total = here.clone() if total is None else total.add_(here)
        assert total is not None
        return total

    def _segment(self, flat_P: Tensor, owner: int) -> Tensor:
        return flat_P.tensor_split(self._drafters)[owner]

    def _arrive(self, rank: int, mine: Tensor) -> None:
        """Wait for all threads and, on GPUs, order this stream behind what theirs have queued."""
        if mine.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(mine.device))
            self._events[rank] = event
        self.waited[rank] += self._meet.wait()
        if mine.is_cuda:
            stream = torch.cuda.current_stream(mine.device)
            for other in list(self._events):
                if other is not None:
                    stream.wait_event(other)
