"""What is known of a target without running it.

Legend: H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import TargetError

__all__ = ["TargetSpec", "end_tokens", "output_head"]


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """What drafters, and readers of their checkpoints, need to know of a target."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    pad_id: int
    tie_word_embeddings: bool
    fingerprint: str
    """Digest of the shape and of a sample of the embedding: the same model, whatever its path
    or type of weights."""

    @staticmethod
    def of(name: str, model: Any, tokenizer: Any) -> TargetSpec:
        """Read from a transformers model. Raises TargetError if it is not a plain decoder."""
        config = model.config.get_text_config()
        rope = _rope(config)
        heads, embedding = config.num_attention_heads, model.get_input_embeddings().weight
        eos_ids = end_tokens(model.config, getattr(model, "generation_config", None), tokenizer)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        try:
            spec = TargetSpec(
                name=name,
                hidden_size=config.hidden_size,
                num_layers=config.num_hidden_layers,
                vocab_size=embedding.shape[0],
                num_attention_heads=heads,
                num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
                intermediate_size=config.intermediate_size,
                rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
                rope_theta=rope.pop("rope_theta", 10000.0),
                rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
                max_position_embeddings=config.max_position_embeddings,
                eos_ids=eos_ids,
                pad_id=pad_id if pad_id is not None else eos_ids[0] if eos_ids else 0,
                tie_word_embeddings=output_head(name, model).weight is embedding,
                fingerprint="",
            )
        except AttributeError as error:
            raise TargetError(f"{name} is not a plain decoder: {error}") from error
        return spec._with_fingerprint(embedding)

    def _with_fingerprint(self, embedding: Tensor) -> TargetSpec:
        shape = {key: value for key, value in asdict(self).items() if key != "name"}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        rows = torch.linspace(0, len(embedding) - 1, 64, device=embedding.device).long()
        # Rounded to bfloat16 first, so that the type in which the model was loaded has no say.
        sample = embedding.detach()[rows].bfloat16().float().cpu()
        digest.update(sample.numpy().tobytes())
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        return TargetSpec(**{**known, "fingerprint": digest.hexdigest()[:16]})


def output_head(name: str, model: Any) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise TargetError(f"{name} has no plain output head (a matrix without bias)")
    return head


def _rope(config: Any) -> dict[str, Any]:
    """Rotary settings in one dictionary, from the spelling of transformers 4 or 5."""
    merged = dict(getattr(config, "rope_scaling", None) or {})
    merged.update(getattr(config, "rope_parameters", None) or {})
    if getattr(config, "rope_theta", None) is not None:
        merged.setdefault("rope_theta", config.rope_theta)
    nested = merged.get("full_attention")  # some models turn each kind of layer differently
    return dict(nested) if isinstance(nested, dict) else merged


def end_tokens(*holders: Any) -> tuple[int, ...]:
    """Every token that ends a turn, as configs and tokenizer name them, each once."""
    found: list[int] = []
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        for token in value if isinstance(value, (list, tuple)) else (value,):
            if token is not None and token not in found:
                found.append(int(token))
    return tuple(found)
