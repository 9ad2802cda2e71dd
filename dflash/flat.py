"""All parameters of a drafter as one vector, and all their gradients as another.

The exchange between drafters, the gradient's norm, the optimizer and the checkpoint then each
handle one tensor. Matrices come first, vectors (norm weights) after them, so that weight decay
can leave the latter out.

Legend: P all parameters, padding included.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

# Each parameter starts at a multiple of this many elements: compiled kernels assume alignment.
_ALIGN = 64


class FlatParameters:
    """Moves a module's parameters into one float32 vector; the module keeps views of it."""

    def __init__(self, module: nn.Module) -> None:
        named = sorted(module.named_parameters(), key=lambda item: item[1].dim() < 2)
        device = named[0][1].device
        starts, end, matrices_end = [], 0, 0
        for _, parameter in named:
            starts.append(end)
            end += -(-parameter.numel() // _ALIGN) * _ALIGN
            if parameter.dim() >= 2:
                matrices_end = end
        self.values_P = torch.zeros(end, device=device)
        self.grads_P = torch.zeros(end, device=device)
        with torch.no_grad():
            for start, (_, parameter) in zip(starts, named, strict=True):
                view = self._view(self.values_P, start, parameter)
                view.copy_(parameter)
                parameter.data = view
                # Backward adds into an existing .grad in place, so it writes here.
                parameter.grad = self._view(self.grads_P, start, parameter)
        self.matrices = self._part(slice(0, matrices_end))
        self.vectors = self._part(slice(matrices_end, end))
        layout = [(name, tuple(parameter.shape)) for name, parameter in named]
        self.layout = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
        """Equal for two modules whose vectors mean the same."""

    def _part(self, part: slice) -> nn.Parameter:
        parameter = nn.Parameter(self.values_P[part])
        parameter.grad = self.grads_P[part]
        return parameter

    @staticmethod
    def _view(flat_P: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
        return flat_P[start : start + parameter.numel()].view(parameter.shape)
