"""The layouts in which DFlash drafters are published, told apart and translated to ours (z-lab's).

    zlab         tensors without prefix, no embedding, no head; SGLang reads it too
    speculators  the same tensors with the target's embedding and head; layer ids counted from the
                 embedding (ours + 1); the decoder's settings one level down
    torchspec    three tensors under other names; ``num_target_layers`` is the number of taps

``docs/formats.md`` describes them; these functions know nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from dflash.drafter_config import DrafterConfig
from dflash.errors import CheckpointError, ConfigError

__all__ = ["EMBED_NAME", "HEAD_NAME", "OWN_TENSORS", "ExportLayout", "Layout", "export_config"]
__all__ += ["our_name", "recognise", "states_depth", "to_zlab"]

Layout = Literal["zlab", "speculators", "torchspec"]
ExportLayout = Literal["zlab", "speculators", "sglang"]

EMBED_NAME = "embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
# Tensors beside the drafter's own: the target's embedding and head, and the maps of a head with
# fewer rows than the target's. Servers accept them in z-lab's layout too.
OWN_TENSORS = frozenset({EMBED_NAME, HEAD_NAME, "t2d", "d2t"})

_TORCHSPEC_NAMES = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}

# What speculators leaves out of `transformer_layer_config`: it stores what differs from these.
_QWEN3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
}


def recognise(raw: Mapping[str, Any], names: Collection[str]) -> Layout:
    """The layout of a ``config.json`` and the tensor names beside it.

    Raises CheckpointError, with what was seen, for anything that is no DFlash drafter.
    """
    kind = raw.get("speculators_model_type")
    if kind is not None or "transformer_layer_config" in raw:
        if kind != "dflash":
            raise CheckpointError(
                f"speculators_model_type is {kind!r}: a drafter of another method, only 'dflash' "
                "can be read"
            )
        return "speculators"
    if raw.get("model_type") == "dflash" or set(_TORCHSPEC_NAMES) <= set(names):
        return "torchspec"
    architectures = str(raw.get("architectures"))  # a wrong file may hold anything there
    if (
        "dflash_config" in raw
        or "DFlashDraftModel" in architectures
        or {"fc.weight", "hidden_norm.weight"} <= set(names)
        or ("num_target_layers" in raw and "block_size" in raw)
    ):
        return "zlab"
    raise CheckpointError(
        f"no DFlash drafter: model_type {raw.get('model_type')!r}, architectures {architectures}, "
        f"tensors {', '.join(sorted(names)[:3]) or 'none'}; known are z-lab's and SGLang's layout "
        "(dflash_config), speculators' (speculators_model_type) and TorchSpec's (context_proj)"
    )


def our_name(name: str, layout: Layout) -> str:
    """The name of a stored tensor in our drafter."""
    return _TORCHSPEC_NAMES.get(name, name) if layout == "torchspec" else name


def states_depth(raw: Mapping[str, Any], layout: Layout) -> bool:
    """Whether the file says how many layers the target has; speculators' and TorchSpec's own
    writers do not."""
    if layout == "torchspec":
        return raw.get("target_num_hidden_layers") is not None
    inner = raw.get("transformer_layer_config") if layout == "speculators" else None
    return any((part or {}).get("num_target_layers") is not None for part in (raw, inner))


def to_zlab(
    raw: Mapping[str, Any], layout: Layout, num_target_layers: int | None = None
) -> dict[str, Any]:
    """A ``config.json`` of any layout as one of z-lab's, for ``DrafterConfig.from_zlab_dict``.

    ``num_target_layers`` is used where the file does not say it. Raises ConfigError for missing
    entries and for what has no counterpart.
    """
    if layout == "speculators":
        return _from_speculators(raw, num_target_layers)
    if layout == "torchspec":
        return _from_torchspec(raw, num_target_layers)
    return dict(raw)


def export_config(
    config: DrafterConfig, layout: ExportLayout, verifier: tuple[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a layout, without ``dtype``.

    ``verifier`` is the target's name and architectures, which speculators' layout records.
    Raises ConfigError for a drafter that the layout cannot express.
    """
    if layout == "speculators":
        if verifier is None:
            raise ConfigError("speculators' layout names the target: give it")
        return _speculators_config(config, *verifier)
    return {key: value for key, value in config.to_zlab_dict().items() if key != "dtype"}


def _speculators_config(
    config: DrafterConfig, verifier: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """Speculators' ``config.json``, without ``dtype``. Raises ConfigError, see export_config."""
    last = config.num_target_layers - 1
    if last in config.target_layer_ids:
        raise ConfigError(
            f"the drafter taps the target's last layer, {last}: speculators' layout cannot say so "
            "(it keeps that id for the target's final states); export as zlab"
        )
    plain = config.to_zlab_dict()
    outer = ("architectures", "block_size", "dflash_config", "dtype")
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {k: v for k, v in plain.items() if k not in outer},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
    }


def _from_speculators(raw: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ConfigError("the drafter's config lacks 'transformer_layer_config'")
    if inner.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(
            f"the drafter's layers are of the kind {inner['model_type']!r}; only 'qwen3' is known"
        )
    width = inner.get("hidden_size", _QWEN3_DEFAULTS["hidden_size"])
    if raw.get("target_hidden_size") not in (None, width):
        raise ConfigError(
            f"the drafter is {width} wide and its target {raw['target_hidden_size']}; "
            "both must be equal"
        )
    depth = _depth(inner.get("num_target_layers", raw.get("num_target_layers")), num_target_layers)
    counted = raw.get("aux_hidden_state_layer_ids")
    if counted is None:  # speculators' own default
        counted = [2, depth // 2, depth - 3]
    if 0 in counted:
        raise ConfigError(
            f"aux_hidden_state_layer_ids {list(counted)} has 0, the embedding's output, which is "
            "no layer; in this layout the target's layers count from 1"
        )
    entries = {name: raw[name] for name in ("sample_from_anchor", "causal", "is_causal")
               if name in raw}  # fmt: skip
    return {
        **_QWEN3_DEFAULTS,
        **inner,
        **entries,
        "block_size": _needed(raw, "block_size"),
        "num_target_layers": depth,
        "dflash_config": {
            "mask_token_id": _needed(raw, "mask_token_id"),
            "target_layer_ids": [layer - 1 for layer in counted],
        },
    }


def _from_torchspec(raw: Mapping[str, Any], num_target_layers: int | None) -> dict[str, Any]:
    nested: Mapping[str, Any] = raw.get("dflash_config") or {}
    known = {**raw, **nested}
    ids = _needed(known, "target_layer_ids")
    taps = raw.get("num_target_layers")
    if taps is not None and taps != len(ids):
        raise ConfigError(
            f"num_target_layers is {taps}, which in TorchSpec's layout is the number of taps, but "
            f"target_layer_ids {list(ids)} has {len(ids)}"
        )
    return {
        **raw,
        "block_size": _needed(known, "block_size"),
        "num_target_layers": _depth(raw.get("target_num_hidden_layers"), num_target_layers),
        "dflash_config": {
            **nested,
            "mask_token_id": _needed(known, "mask_token_id"),
            "target_layer_ids": ids,
        },
    }


def _needed(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise ConfigError(f"the drafter's config lacks {name!r}")
    return raw[name]


def _depth(stated: int | None, given: int | None) -> int:
    depth = stated if stated is not None else given
    if depth is None:
        raise ConfigError(
            "the drafter's config does not say how many layers its target has; name the target "
            "(--target)"
        )
    return depth
