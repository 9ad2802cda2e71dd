"""`dflash inspect`: what a drafter on disk is, and what would make it draft wrongly in silence.

A wrong drafter costs no correctness, only acceptance, so nothing fails: the findings here are the
ways in which that has happened. `docs/formats.md` lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash import config_checks, target_checks
from dflash.agreement import Agreement
from dflash.checkpoint_format import (
    CONFIG_NAME,
    check_names,
    expected_tensors,
    find_checkpoint,
    missing_own,
    read_raw_config,
    type_problem,
    with_tied_head,
)
from dflash.config_checks import Finding
from dflash.drafter_config import DrafterConfig
from dflash.entry_kinds import entry_problems
from dflash.errors import CheckpointError, ConfigError
from dflash.formats import OWN_TENSORS, Layout, our_name, recognise, states_depth, to_zlab
from dflash.target import Target
from dflash.weights import StoredWeights, floating

__all__ = ["Finding", "Inspection", "inspect_checkpoint"]


@dataclass
class Inspection:
    """What was found out; entries are None where the files do not even say that much."""

    path: Path
    layout: Layout | None = None
    config: DrafterConfig | None = None
    depth_stated: bool = True
    """Whether the number of target layers is known; else the config's is the least possible."""
    parameters: int = 0
    own_parameters: int = 0
    """Numbers of the embedding and head that the checkpoint brings along."""
    size: int = 0
    """Bytes of the weights."""
    dtypes: Counter[str] = field(default_factory=Counter)
    """How many tensors have which type."""
    files: int = 0
    target: str | None = None
    agreement: Agreement | None = None
    """What the drafter predicts of the target's own text, where that was asked for."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    """What some reader may stumble over; no fault of the drafter."""

    def add(self, kind: str, *texts: str) -> None:
        self.findings += [Finding(kind, text) for text in texts]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.layout,
            "config": None if self.config is None else self._config(),
            "dtypes": dict(self.dtypes),
            "parameters": self.parameters,
            "own_parameters": self.own_parameters,
            "bytes": self.size,
            "files": self.files,
            "target": self.target,
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
            "findings": [finding._asdict() for finding in self.findings],
            "notes": [note._asdict() for note in self.notes],
        }

    def _config(self) -> dict[str, Any]:
        assert self.config is not None
        shown = dict(vars(self.config))
        return shown if self.depth_stated else shown | {"num_target_layers": None}

    def rows(self) -> list[tuple[str, str]]:
        """For a table: what, and the facts."""
        rows: list[tuple[str, str]] = [("format", self.layout or "unknown")]
        if self.config is not None:
            rows += _shape_rows(self.config, self.depth_stated)
        types = ", ".join(f"{name} ({count} tensors)" for name, count in self.dtypes.items())
        own = f" and {self.own_parameters:,} of embedding and head" if self.own_parameters else ""
        rows += [
            ("dtype", types or "no tensors"),
            ("parameters", f"{self.parameters:,}{own}"),
            ("size", f"{self.size / 1e6:,.1f} MB in {self.files} file(s)"),
        ]
        if self.agreement is not None:
            rows.append(("agreement", str(self.agreement)))
        return rows


def _shape_rows(config: DrafterConfig, depth_stated: bool) -> list[tuple[str, str]]:
    depth = f"{config.num_target_layers}" if depth_stated else "an unknown number of"
    scaling = "" if config.rope_scaling is None else f", {dict(config.rope_scaling)}"
    return [
        ("block size", f"{config.block_size}, the anchor included"),
        (
            "layers",
            f"{config.num_hidden_layers} of {config.hidden_size}, {config.num_attention_heads} "
            f"heads ({config.num_key_value_heads} key/value) of {config.head_dim}, inner "
            f"{config.intermediate_size}",
        ),
        ("taps", f"{', '.join(map(str, config.target_layer_ids))} of {depth} target layers"),
        ("mask token", f"{config.mask_token_id} of {config.vocab_size} rows"),
        ("rope", f"theta {config.rope_theta:g}{scaling}"),
    ]


def inspect_checkpoint(
    path: Path, target: Target | None = None, *, probe_tokens: int = 0
) -> Inspection:
    """Look through a drafter (or the newest one of a run); nothing that is wrong with it raises.

    ``target`` is the model it shall serve; with ``probe_tokens`` the target writes so many tokens
    to see whether the drafter predicts them. Raises CheckpointError only where ``path`` is no
    directory or a run without checkpoints.
    """
    found = Inspection(find_checkpoint(path), target=target.spec.name if target else None)
    try:
        raw = read_raw_config(found.path / CONFIG_NAME)
    except CheckpointError as error:
        found.add("config", str(error))
        return found
    try:
        weights = StoredWeights.open(found.path)
    except CheckpointError as error:
        found.add("files", str(error))
        return found
    found.files = len(set(weights.files.values()))
    try:
        found.layout = recognise(raw, weights.files)
    except CheckpointError as error:
        found.add("format", str(error))
        return found
    if bad := entry_problems(raw):
        found.add("config", *bad)
    else:
        findings, notes = config_checks.check_config(raw, found.layout, weights.files, found.path)
        found.findings += findings
        found.notes += notes
        _read_shape(found, raw, target)
    own = _check_tensors(found, raw, weights)
    if target is not None:
        _check_target(found, target, with_tied_head(raw, own), probe_tokens)
    return found


def _read_shape(found: Inspection, raw: Mapping[str, Any], target: Target | None) -> None:
    assert found.layout is not None
    stated = states_depth(raw, found.layout)
    depth = target.spec.num_layers if target is not None else None
    found.depth_stated = stated or depth is not None
    if not found.depth_stated:
        depth = config_checks.least_depth(raw, found.layout)
    try:
        found.config = DrafterConfig.from_zlab_dict(to_zlab(raw, found.layout, depth))
    except ConfigError as error:
        # What the checks of single entries have said is not said twice.
        if not found.findings:
            found.add("config", str(error))
        return
    if found.depth_stated:
        found.findings += config_checks.check_layer_ids(found.config, found.layout)


def _check_tensors(
    found: Inspection, raw: Mapping[str, Any], weights: StoredWeights
) -> dict[str, Tensor]:
    """Names, shapes and numbers of all tensors; the embedding and head among them."""
    assert found.layout is not None
    shapes: dict[str, tuple[int, ...]] = {}
    own: dict[str, Tensor] = {}
    for stored_name, tensor in weights.items():
        name = our_name(stored_name, found.layout)
        found.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        found.size += tensor.numel() * tensor.element_size()
        if name in OWN_TENSORS:
            own[name] = tensor
            found.own_parameters += tensor.numel() if floating(tensor) else 0
        else:
            shapes[name] = tuple(tensor.shape)
            found.parameters += tensor.numel()
            if not floating(tensor):
                found.add("dtype", type_problem(name, tensor))
        _check_numbers(found, stored_name, tensor)
    if found.config is not None:
        try:
            found.add("tensors", *check_names(shapes, expected_tensors(found.config)))
        except ConfigError as error:
            found.add("rope", str(error))
    found.add("tensors", *(f"{n} is missing" for n in missing_own(raw, found.layout, own)))
    stated = str(raw.get("dtype") or raw.get("torch_dtype") or "")
    if stated and set(found.dtypes) - {stated, "int64", "bool"}:
        text = f"config.json says {stated}, the tensors are {', '.join(found.dtypes)}"
        found.notes.append(Finding("dtype", f"{text}: a reader may convert them"))
    return own


def _check_numbers(found: Inspection, name: str, tensor: Tensor) -> None:
    if not floating(tensor):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        found.add("nan", f"{name} holds {bad} NaN or infinite numbers of {tensor.numel()}")
    elif tensor.numel() and not bool(tensor.any()):
        found.add("zero", f"{name} is all zero: it was never written or never trained")


def _check_target(
    found: Inspection, target: Target, own: Mapping[str, Tensor], probe_tokens: int
) -> None:
    found.findings += target_checks.check_frozen(own, target)
    if found.config is None:
        return
    found.findings += target_checks.check_shape(found.config, target)
    if probe_tokens and not found.findings:
        found.agreement, findings = target_checks.check_agreement(found.path, target, probe_tokens)
        found.findings += findings
