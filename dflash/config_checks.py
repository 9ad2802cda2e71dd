"""What a drafter's ``config.json`` alone can be wrong about.

Each check is a statement about single entries, so that one wrong entry does not hide another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash.drafter_config import DrafterConfig
from dflash.errors import ConfigError
from dflash.formats import Layout
from dflash.geometry import target_layer_ids

__all__ = ["Finding", "check_config", "check_layer_ids", "least_depth"]

# What shows a relative of DFlash whose slot k predicts token a + k + 1.
_SHIFTED_ENTRIES = ("sample_from_anchor", "shift_label", "shift_labels")
_SHIFTED_NAMES = ("dspark", "domino", "deepspec")
_SHIFTED_TENSORS = ("markov", "confidence", "gru")


class Finding(NamedTuple):
    """One thing that is wrong; ``kind`` is a stable word for programs."""

    kind: str
    text: str


def check_config(
    raw: Mapping[str, Any], layout: Layout, names: Collection[str], place: Path
) -> tuple[list[Finding], list[Finding]]:
    """``(findings, notes)`` about the entries; ``names`` are those of the tensors beside it."""
    inner = _decoder_entries(raw, layout)
    findings = [
        *_shifted_labels(raw, names),
        *_mask_token(raw, inner),
        *_layer_range(raw, inner, layout),
        *_rope_spellings(inner),
        *_block_sizes(raw),
    ]
    return findings, _notes(raw, inner, layout, place)


def check_layer_ids(config: DrafterConfig, layout: Layout) -> list[Finding]:
    """Taps that are the usual ones, but counted from the wrong layer."""
    ids, shift = config.target_layer_ids, 0
    try:
        usual = target_layer_ids(config.num_target_layers, len(ids))
    except ConfigError:
        return []
    if len(ids) > 1:  # a single tap is anywhere
        shift = next((s for s in (1, -1) if ids == tuple(i + s for i in usual)), 0)
    if not shift:
        return []
    written = [i + 1 for i in ids] if layout == "speculators" else list(ids)
    right = [i + 1 for i in usual] if layout == "speculators" else list(usual)
    counts = "from 1 (0 is the embedding)" if layout == "speculators" else "from 0"
    return [
        Finding(
            "layer-ids",
            f"the tapped layers {written} are the usual ones {right} {shift:+d}: this layout "
            f"counts layers {counts}, so they look off by one",
        )
    ]


def least_depth(raw: Mapping[str, Any], layout: Layout) -> int | None:
    """The number of layers that a target has at least, by the taps; None without any."""
    ids = _layer_ids(raw, layout)
    return max(ids) + 1 if ids else None


def _decoder_entries(raw: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    inner = raw.get("transformer_layer_config") if layout == "speculators" else raw
    return inner if isinstance(inner, Mapping) else {}


def _nested(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = raw.get("dflash_config")
    return nested if isinstance(nested, Mapping) else {}


def _shifted_labels(raw: Mapping[str, Any], names: Collection[str]) -> list[Finding]:
    nested = _nested(raw)
    signs = [f"it sets {name}" for name in _SHIFTED_ENTRIES if raw.get(name) or nested.get(name)]
    said = [str(text).lower() for text in raw.get("architectures") or []]
    said += [str(raw.get(key, "")).lower() for key in ("model_type", "speculators_model_type")]
    signs += [f"it calls itself {name}" for name in _SHIFTED_NAMES if any(name in t for t in said)]
    signs += [
        f"it has the tensor {name}"
        for name in sorted(names)
        if any(part in name.lower() for part in _SHIFTED_TENSORS)
    ][:3]
    if not signs:
        return []
    return [
        Finding(
            "shifted-labels",
            f"{'; '.join(signs)}: a relative of DFlash in which slot k predicts the token behind "
            "its own position; its tensors load by name and every draft is one token off",
        )
    ]


def _mask_token(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> list[Finding]:
    mask = _nested(raw).get("mask_token_id", raw.get("mask_token_id"))
    rows = inner.get("vocab_size")
    if mask is None:
        text = "mask_token_id is missing: a server would take one of its own"
    elif isinstance(mask, int) and isinstance(rows, int) and not 0 <= mask < rows:
        text = f"mask_token_id {mask} is not a row of the embedding (0..{rows - 1})"
    else:
        return []
    return [Finding("mask-token", text)]


def _layer_ids(raw: Mapping[str, Any], layout: Layout) -> list[int]:
    """The taps as our layers, counted from 0; none where they are left out or are no numbers."""
    if layout == "speculators":
        ids, first = raw.get("aux_hidden_state_layer_ids"), 1
    else:
        ids, first = _nested(raw).get("target_layer_ids", raw.get("target_layer_ids")), 0
    if not isinstance(ids, (list, tuple)) or not all(isinstance(i, int) for i in ids):
        return []
    return [i - first for i in ids]


def _layer_range(raw: Mapping[str, Any], inner: Mapping[str, Any], layout: Layout) -> list[Finding]:
    ids = _layer_ids(raw, layout)
    depth = None if layout == "torchspec" else inner.get("num_target_layers")
    counted = "from 1 in this layout" if layout == "speculators" else "from 0"
    findings = []
    if ids and min(ids) < 0:
        findings.append(f"a tap lies before the first layer: {_as_written(ids, layout)}")
    if isinstance(depth, int) and ids and max(ids) >= depth:
        findings.append(
            f"the taps {_as_written(ids, layout)} go beyond the target's {depth} layers"
        )
    return [Finding("layer-ids", f"{text} (layers count {counted})") for text in findings]


def _as_written(ids: list[int], layout: Layout) -> list[int]:
    return [i + 1 for i in ids] if layout == "speculators" else ids


def _rope_spellings(inner: Mapping[str, Any]) -> list[Finding]:
    newer = inner.get("rope_parameters")
    if not isinstance(newer, Mapping):
        return []
    older_theta, newer_theta = inner.get("rope_theta"), newer.get("rope_theta")
    findings = []
    if older_theta is not None and newer_theta is not None and older_theta != newer_theta:
        findings.append(f"rope_theta is {older_theta}, in rope_parameters {newer_theta}")
    if "rope_scaling" in inner:
        older = _kind_of(inner["rope_scaling"])
        if older != _kind_of(newer):
            findings.append(
                f"rope_scaling is of the type {older!r}, rope_parameters {_kind_of(newer)!r}"
            )
    ending = "transformers 4 and 5 would turn positions differently"
    return [Finding("rope", f"{text}: {ending}") for text in findings]


def _kind_of(scaling: Any) -> str:
    known = scaling if isinstance(scaling, Mapping) else {}
    return str(known.get("rope_type") or known.get("type") or "default")


def _block_sizes(raw: Mapping[str, Any]) -> list[Finding]:
    outer, nested = raw.get("block_size"), _nested(raw).get("block_size")
    if outer is None or nested is None or outer == nested:
        return []
    text = f"block_size is {outer}, in dflash_config {nested}: readers differ in which they take"
    return [Finding("block-size", text)]


def _notes(
    raw: Mapping[str, Any], inner: Mapping[str, Any], layout: Layout, place: Path
) -> list[Finding]:
    notes = []
    older, newer = "rope_theta" in inner, "rope_parameters" in inner
    if older != newer:
        have, lacks, version = (
            ("rope_theta", "rope_parameters", 5) if older else ("rope_parameters", "rope_theta", 4)
        )
        notes.append(
            ("rope", f"it has {have} and no {lacks}, which readers of transformers {version} want")
        )
    if layout == "zlab":
        for name in ("block_size", "layer_types", "num_target_layers"):
            if name not in raw:
                notes.append(("config", f"{name} is not at the top, where z-lab's loader reads it"))
        if "auto_map" in raw and not list(place.glob("*.py")):
            notes.append(("auto-map", "auto_map asks for a module that is not beside the weights"))
    return [Finding(*note) for note in notes]
