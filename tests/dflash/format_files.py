"""Drafters that fit `model_dir`'s target, and what it takes to break one on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash.drafter import Drafter, DrafterConfig

SPARE = 6  # the token <spare>, which no text has


def fitting_config(**changes) -> DrafterConfig:
    """Taps 1, 2, 3 of 6 layers, as the formula has them; blocks of 4; the target's sizes."""
    fields = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 47,
        "num_target_layers": 6,
        "target_layer_ids": (1, 2, 3),
        "block_size": 4,
        "mask_token_id": SPARE,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "eos_token_id": (2,),
    }
    return DrafterConfig(**(fields | changes))


def fitting_drafter(seed: int = 0, **changes) -> Drafter:
    drafter = Drafter(fitting_config(**changes))
    drafter.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1:  # norms that differ, so that a mix-up shows
                noise = torch.Generator().manual_seed(len(name) + seed)
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return drafter


def read_config(place: Path) -> dict:
    return json.loads((place / "config.json").read_text())


def edit_config(place: Path, change) -> None:
    """`change` gets the raw config and alters it."""
    raw = read_config(place)
    change(raw)
    (place / "config.json").write_text(json.dumps(raw))


def edit_tensors(place: Path, change) -> None:
    """`change` gets all tensors and alters the dictionary."""
    tensors = {k: v.clone() for k, v in load_file(place / "model.safetensors").items()}
    change(tensors)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, place / "model.safetensors")


def to_torchspec(place: Path, *, stated: bool = True) -> None:
    """Turn a directory in z-lab's layout into one of TorchSpec's."""
    names = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }

    def rename(tensors):
        for ours, theirs in names.items():
            tensors[theirs] = tensors.pop(ours)

    def rewrite(raw):
        raw["model_type"] = "dflash"
        if stated:
            raw["target_num_hidden_layers"] = raw["num_target_layers"]
        raw["num_target_layers"] = len(raw["dflash_config"]["target_layer_ids"])

    edit_tensors(place, rename)
    edit_config(place, rewrite)
