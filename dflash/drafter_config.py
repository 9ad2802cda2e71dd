"""The shape of a drafter, and its translation to and from z-lab's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash.errors import ConfigError
from dflash.geometry import target_layer_ids

__all__ = ["DrafterConfig"]

# In transformers 5 these sit in `rope_parameters` beside the scaling; they are not part of it.
_NOT_SCALING = frozenset({"rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that fixes a drafter's tensors and its behaviour.

    Raises ConfigError when the numbers contradict each other.
    """

    hidden_size: int
    """Width of drafter and target; they are equal, because both share embedding and head."""
    intermediate_size: int
    num_hidden_layers: int
    """Layers of the drafter."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's embedding."""
    num_target_layers: int
    """Layers of the target."""
    target_layer_ids: tuple[int, ...]
    """Tapped target layers, in the order in which their features are concatenated."""
    block_size: int
    """Slots of a block, the anchor included."""
    mask_token_id: int
    """The target's embedding row that stands for a token not known yet."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "num_target_layers",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a positive whole number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}; it must be at least 2")
        if not isinstance(self.mask_token_id, int):
            raise ConfigError(f"mask_token_id is {self.mask_token_id}; it must be a token's number")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding "
                f"(0..{self.vocab_size - 1})"
            )
        ids = self.target_layer_ids
        if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
            raise ConfigError(f"target_layer_ids {ids} must be different layers, at least one")
        if max(ids) >= self.num_target_layers:
            raise ConfigError(
                f"target_layer_ids {ids} go beyond the target's last layer, "
                f"{self.num_target_layers - 1}"
            )

    @property
    def num_taps(self) -> int:
        """How many target layers are tapped (T)."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features (F = T * H)."""
        return self.num_taps * self.hidden_size

    def to_zlab_dict(self) -> dict[str, Any]:
        """The ``config.json`` that z-lab's loader, vLLM and SGLang read.

        ``block_size`` is written in both places, and the rotary settings in the spelling of
        transformers 4 and that of 5, because readers of each kind exist. No ``auto_map``: it
        would demand a ``dflash.py`` beside the weights.
        """
        rope: dict[str, Any] = dict(self.rope_scaling or {"rope_type": "default"})
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": (
                list(self.eos_token_id)
                if isinstance(self.eos_token_id, tuple)
                else self.eos_token_id
            ),
            "dtype": "bfloat16",
            "use_cache": True,
        }

    @classmethod
    def from_zlab_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read a ``config.json`` of z-lab's layout, older or newer.

        Raises ConfigError for a missing entry and for a drafter of another kind (sliding windows,
        causal blocks, shifted labels): such weights fit by name and would be silently wrong.
        """
        _refuse_relatives(raw)
        dflash = raw.get("dflash_config") or {}
        theta, scaling = _read_rope(raw)
        try:
            num_target_layers = raw["num_target_layers"]
            num_layers = raw["num_hidden_layers"]
            ids = dflash.get("target_layer_ids") or target_layer_ids(num_target_layers, num_layers)
            heads = raw["num_attention_heads"]
            block_size = raw["block_size"] if "block_size" in raw else dflash["block_size"]
            eos = raw.get("eos_token_id")
            return cls(
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_hidden_layers=num_layers,
                num_attention_heads=heads,
                num_key_value_heads=raw.get("num_key_value_heads", heads),
                head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
                vocab_size=raw["vocab_size"],
                num_target_layers=num_target_layers,
                target_layer_ids=tuple(ids),
                block_size=block_size,
                mask_token_id=dflash["mask_token_id"],
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=raw.get("max_position_embeddings", 2048),
                initializer_range=raw.get("initializer_range", 0.02),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            )
        except KeyError as missing:
            raise ConfigError(f"the drafter's config lacks {missing}") from None


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    newer: Mapping[str, Any] = raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta") or newer.get("rope_theta") or 10000.0
    factor = raw.get("partial_rotary_factor") or newer.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {factor}; DFlash drafters rotate the whole head"
        )
    older: Mapping[str, Any] = raw.get("rope_scaling") or newer
    scaling = {k: v for k, v in older.items() if k not in _NOT_SCALING and v is not None}
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    is_default = scaling.get("rope_type", "default") == "default"
    return float(theta), None if is_default else scaling


def _refuse_relatives(raw: Mapping[str, Any]) -> None:
    dflash: Mapping[str, Any] = raw.get("dflash_config") or {}
    kinds = set(raw.get("layer_types") or ["full_attention"])
    windowed = raw.get("use_sliding_window") or dflash.get("use_swa")
    if kinds != {"full_attention"} or windowed:
        raise ConfigError(
            f"the drafter uses sliding-window attention (layer_types {sorted(kinds)}); "
            "only full attention is supported"
        )
    for name in ("sample_from_anchor", "causal", "is_causal"):
        if dflash.get(name) or raw.get(name):
            raise ConfigError(
                f"the drafter sets {name}: it is a relative of DFlash (slot 0 predicts, or blocks "
                "are causal) whose weights would load by name and draft wrongly"
            )
    if raw.get("attention_bias"):
        raise ConfigError("the drafter has attention_bias; DFlash drafters have no biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
