"""Rotary position embeddings of the drafter: the target's own settings, recomputed here.

The drafter must turn positions exactly as a server that loads its config would, so the scalings
follow the published definitions (linear; "llama3" of Llama 3.1; YaRN, arXiv 2309.00071) and are
compared with transformers in the tests.

Legend: b batch, L positions, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import ConfigError

__all__ = ["Rope", "apply_rope", "rope_frequencies"]


class Rope(nn.Module):
    """Cosines and sines of absolute positions; no parameters, nothing saved.

    The frequencies are kept as float32 outside of the module's buffers, because ``module.to(bf16)``
    would round them and shift far positions by whole radians.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
    ) -> None:
        super().__init__()
        self._inv_freq_F, self._amplitude = rope_frequencies(
            head_dim, theta, scaling, max_positions
        )

    def forward(self, positions_bL: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each float32 ``[b, 1, L, D]``, ready to broadcast over heads."""
        if self._inv_freq_F.device != positions_bL.device:
            self._inv_freq_F = self._inv_freq_F.to(positions_bL.device)
        angles_bLF = positions_bL.unsqueeze(-1).float() * self._inv_freq_F
        angles_b1LD = torch.cat([angles_bLF, angles_bLF], dim=-1).unsqueeze(1)
        return angles_b1LD.cos() * self._amplitude, angles_b1LD.sin() * self._amplitude


def apply_rope(x_bhLD: Tensor, cos_b1LD: Tensor, sin_b1LD: Tensor) -> Tensor:
    """Turn each head's (i, i + D/2) pairs by their position's angles, as Llama and Qwen do."""
    first, second = x_bhLD.chunk(2, dim=-1)
    return x_bhLD * cos_b1LD + torch.cat([-second, first], dim=-1) * sin_b1LD


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[Tensor, float]:
    """``(inverse frequencies float32 [F], amplitude of cos and sin)``.

    ``scaling`` is a ``rope_scaling`` dictionary of a Hugging Face config (key ``rope_type`` or the
    older ``type``) or None. Raises ConfigError for a kind that this drafter does not know, since
    to ignore it would silently cost acceptance, and for missing entries.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary embeddings need an even number")
    # On the CPU whatever the default device is: a drafter may be laid out on "meta" first.
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq_F = 1.0 / (theta**exponents_F)
    if not scaling:
        return inv_freq_F, 1.0
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ConfigError(
            f"partial_rotary_factor {scaling['partial_rotary_factor']} is not supported: "
            "DFlash drafters rotate the whole head"
        )
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    try:
        if kind == "default":
            return inv_freq_F, 1.0
        if kind == "linear":
            return inv_freq_F / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(inv_freq_F, scaling), 1.0
        if kind == "yarn":
            return _yarn(inv_freq_F, theta, scaling, max_positions)
    except KeyError as missing:
        raise ConfigError(f"rope_scaling of type {kind!r} lacks the entry {missing}") from None
    raise ConfigError(
        f"rope_scaling of type {kind!r} is not supported; known: default, linear, llama3, yarn"
    )


def _llama3(inv_freq_F: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow down long wavelengths by ``factor``, keep short ones, blend between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    # How often each frequency turns within the length that the model was first trained on.
    turns_F = float(scaling["original_max_position_embeddings"]) * inv_freq_F / (2 * math.pi)
    kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq_F * (kept_F + (1.0 - kept_F) / factor)


def _yarn(
    inv_freq_F: Tensor, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """YaRN's NTK-by-parts: interpolate slow dimensions, keep fast ones, ramp between by index."""
    original = float(scaling["original_max_position_embeddings"])
    given = scaling.get("factor")
    factor = max_positions / original if given is None else float(given)
    num_freq = inv_freq_F.numel()

    def index_of(turns: float) -> float:
        # The (fractional) frequency index that makes this many turns in the original length.
        return num_freq * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = index_of(float(scaling.get("beta_fast") or 32))
    high = index_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_freq - 1)
    width = high - low if high != low else 0.001
    slowed_F = ((torch.arange(num_freq, dtype=torch.float32, device="cpu") - low) / width).clamp(
        0.0, 1.0
    )
    frequencies_F = inv_freq_F * (1.0 - slowed_F + slowed_F / factor)
    return frequencies_F, _yarn_amplitude(factor, scaling)


def _yarn_amplitude(factor: float, scaling: Mapping[str, Any]) -> float:
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return (growth * float(mscale) + 1.0) / (growth * float(mscale_all) + 1.0)
    return growth + 1.0
