"""What shows only beside the target that a drafter shall serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.agreement import Agreement, measure_agreement
from dflash.checkpoint_format import load_drafter, own_mismatches, target_differences
from dflash.config_checks import Finding
from dflash.drafter_config import DrafterConfig
from dflash.target import Target

__all__ = ["check_agreement", "check_frozen", "check_shape"]


def check_frozen(own: Mapping[str, Tensor], target: Target) -> list[Finding]:
    """The embedding and head that a drafter brings must be the target's."""
    return [Finding("frozen-weights", text) for text in own_mismatches(own, target)]


def check_shape(config: DrafterConfig, target: Target) -> list[Finding]:
    """Sizes, positions and the mask token."""
    spec = target.spec
    findings = [
        Finding("target", f"the drafter's target has {text} as {spec.name!r}")
        for text in target_differences(config, spec)
    ]
    if config.rope_theta != spec.rope_theta:
        text = f"rope_theta is {config.rope_theta:g}, the target's {spec.rope_theta:g}"
        findings.append(Finding("rope", text))
    ours, theirs = _scaling(config.rope_scaling), _scaling(spec.rope_scaling)
    if ours != theirs:
        findings.append(Finding("rope", f"rope_scaling is {ours}, the target's {theirs}"))
    return findings + _mask_token(config.mask_token_id, target)


def check_agreement(path: Path, target: Target, tokens: int) -> tuple[Agreement, list[Finding]]:
    """Decode with the drafter: labels or taps that are off by one fit the target's text better
    when they are read as such. Raises CheckpointError where the drafter cannot be loaded."""
    drafter, _ = load_drafter(path, target=target.spec, frozen=target)
    drafter.to(target.device, target.dtype).requires_grad_(False)
    agreement = measure_agreement(target, drafter, tokens)
    findings = []
    if agreement.shifted_fits_better:
        text = (
            f"slot k predicts the token behind its own position ({agreement.shifted:.0%} of "
            f"{agreement.count} tokens, {agreement.plain:.0%} read as DFlash): the labels were "
            "shifted by one in training"
        )
        findings.append(Finding("shifted-labels", text))
    for offset in agreement.better_offsets:
        text = (
            f"the drafter predicts {agreement.taps[offset]:.0%} of {agreement.count} tokens with "
            f"every tap moved by {offset:+d}, {agreement.plain:.0%} with its own: the layer ids "
            "are off by one"
        )
        findings.append(Finding("layer-ids", text))
    return agreement, findings


def _scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Without what both spellings of transformers may add."""
    if scaling is None:
        return None
    kept = {k: v for k, v in scaling.items() if v is not None and k != "rope_theta"}
    if "type" in kept:
        kept.setdefault("rope_type", kept.pop("type"))
    return kept


def _mask_token(mask: int, target: Target) -> list[Finding]:
    """It must be no token that text contains, nor one with a meaning of its own."""
    tokenizer, spec = target.tokenizer, target.spec
    if mask >= len(tokenizer):
        return []
    text = tokenizer.convert_ids_to_tokens(mask)
    if mask in spec.eos_ids or mask == spec.pad_id:
        reason = "ends or pads a text"
    elif mask in tokenizer.all_special_ids or mask in tokenizer.added_tokens_decoder:
        return []
    else:
        reason = "occurs in texts"
    return [Finding("mask-token", f"mask_token_id {mask} is {text!r}, which {reason}")]
