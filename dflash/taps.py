"""Forward hooks that collect the outputs of chosen decoder layers.

Legend: b batch, C tokens, H hidden, F = tapped layers * H.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Taps", "tap"]


class _Enough(Exception):
    """Unwinds a forward pass behind the last layer that is wanted."""


class Taps:
    """Collects layer outputs of one forward pass of this thread."""

    _of_thread = threading.local()

    def __init__(self, layer_ids: tuple[int, ...], *, whole: bool) -> None:
        self.layer_ids = layer_ids
        self.outputs: dict[int, Tensor] = {}
        self._last = None if whole or not layer_ids else max(layer_ids)

    def of(self, forward: Any) -> Any:
        """Run ``forward`` with the taps open; its result, or None if it was cut short."""
        self._of_thread.open = self
        try:
            return forward()
        except _Enough:
            return None
        finally:
            self._of_thread.open = None

    def context(self) -> Tensor:
        """The features side by side, in the order of ``layer_ids``: ``[b, C, F]``."""
        return torch.cat([self.outputs[layer] for layer in self.layer_ids], dim=-1)

    @classmethod
    def record(cls, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        """Forward hook of decoder layer ``layer``. It keeps nothing between calls and looks for
        the running thread's taps, so that threads can share a module."""
        taps = getattr(cls._of_thread, "open", None)
        if taps is None:
            return
        if layer in taps.layer_ids:
            taps.outputs[layer] = output[0] if isinstance(output, tuple) else output
        if layer == taps._last:
            raise _Enough


def tap(layers: nn.ModuleList) -> None:
    """Hook every layer once, however many targets share the model."""
    for number, layer in enumerate(layers):
        hooks = layer._forward_hooks.values()
        if not any(getattr(hook, "func", None) == Taps.record for hook in hooks):
            layer.register_forward_hook(partial(Taps.record, number))
