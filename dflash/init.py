"""Start a drafter from its target: first layers below, last layer on top, features through one tap.

A drafter that starts from noise spends its first hundreds of steps on what the target knows
already (`benchmarks/quickstart_recipe.py --only base,random` compares the two). The bottom layer
meets token embeddings, as the target's first one does; the top layer feeds the head, as the
target's last one does.

What is copied, for drafter layer i from target layer l:
- q, k, v, o and the MLP; the norms in front are folded into the matrices behind them, so that the
  drafter's norms start at one and its context keys and values, which pass no input norm, are scaled
  as the target's are;
- the target has no norm on queries and keys (unless it is Qwen3-like, then that is copied), the
  drafter has: it starts at the target's mean query and key size, which keeps attention as sharp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.drafter import Drafter, DrafterLayer
from dflash.errors import ConfigError
from dflash.target import Target


def source_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Target layers to copy: the first n - 1 and the last one; for one layer, the first.

    >>> source_layers(30, 3)
    (0, 1, 29)
    """
    if num_draft_layers == 1:
        return (0,)
    return (*range(num_draft_layers - 1), num_target_layers - 1)


@torch.no_grad()
def init_from_target(
    drafter: Drafter, target: Target, sample_ids: Tensor, generator: torch.Generator
) -> tuple[int, ...]:
    """Copy the target's weights into `drafter`, in place; returns the target layers used.

    Args:
        target: has Llama-like decoder layers (`self_attn.q_proj`, `mlp.gate_proj`, …). Layers with
            another MLP (mixtures of experts) give their attention only; biases are dropped, the
            drafter has none.
        sample_ids: some text `[S]`, on which the sizes of queries and keys are measured.
        generator: for the small noise through which the taps other than the last one come in.

    Raises ConfigError where the drafter's sizes are not the target's: nothing is copied then.
    """
    layers = target.decoder.layers
    used = source_layers(len(layers), len(drafter.layers))
    for index in used:
        _check_sizes(drafter, layers[index], index)
    sizes = query_key_rms(target, sample_ids, used)
    hidden, fc = drafter.config.hidden_size, drafter.fc.weight
    noise = torch.randn(fc.shape, generator=generator) * 0.002
    noise[:, -hidden:] += torch.eye(hidden)  # the last tap is the input of a late layer as it is
    fc.copy_(noise)
    drafter.hidden_norm.weight.fill_(1.0)
    drafter.norm.weight.copy_(_norm_scale(target.decoder.norm))
    for layer, index in zip(drafter.layers, used, strict=True):
        assert isinstance(layer, DrafterLayer)
        _copy_layer(layer, layers[index], sizes[index])
    return used


def query_key_rms(
    target: Target, sample_ids: Tensor, indices: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Mean root-mean-square size per head of the queries and keys of some target layers."""
    sizes: dict[tuple[int, str], float] = {}
    hooks = []

    def record(key: tuple[int, str]) -> Any:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            heads = out.detach().float().reshape(-1, target.spec.head_dim)
            sizes[key] = float(heads.square().mean(-1).sqrt().mean())

        return hook

    layers = target.decoder.layers
    for index in indices:
        attention = layers[index].self_attn
        hooks.append(attention.q_proj.register_forward_hook(record((index, "q"))))
        hooks.append(attention.k_proj.register_forward_hook(record((index, "k"))))
    try:
        ids_1S = sample_ids[None].to(target.device)
        target.features(ids_1S, torch.tensor([ids_1S.shape[1]]), last_hidden=True)
    finally:
        for handle in hooks:
            handle.remove()
    return {index: (sizes[index, "q"], sizes[index, "k"]) for index in indices}


def _norm_scale(norm: Any) -> Tensor:
    """What a target's RMSNorm multiplies by: its weight, or 1 + weight in the Gemma family."""
    weight: Tensor = norm.weight.float()
    return weight + 1.0 if "Gemma" in type(norm).__name__ else weight


def _copy_layer(layer: DrafterLayer, source: Any, sizes: tuple[float, float]) -> None:
    attention, theirs = layer.self_attn, source.self_attn
    before = _norm_scale(source.input_layernorm)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight.copy_(getattr(theirs, name).weight.float() * before)
    attention.o_proj.weight.copy_(theirs.o_proj.weight)
    for norm, name, size in (
        (attention.q_norm, "q_norm", sizes[0]),
        (attention.k_norm, "k_norm", sizes[1]),
    ):
        if hasattr(theirs, name):
            norm.weight.copy_(_norm_scale(getattr(theirs, name)))
        else:
            norm.weight.fill_(size)
    layer.input_layernorm.weight.fill_(1.0)
    mlp: Any = getattr(source, "mlp", None)
    if hasattr(mlp, "gate_proj") and mlp.gate_proj.weight.shape == layer.mlp.gate_proj.weight.shape:
        before = _norm_scale(source.post_attention_layernorm)
        layer.mlp.gate_proj.weight.copy_(mlp.gate_proj.weight.float() * before)
        layer.mlp.up_proj.weight.copy_(mlp.up_proj.weight.float() * before)
        layer.mlp.down_proj.weight.copy_(mlp.down_proj.weight)
        layer.post_attention_layernorm.weight.fill_(1.0)


def _check_sizes(drafter: Drafter, source: Any, index: int) -> None:
    attention = getattr(source, "self_attn", None)
    if not hasattr(attention, "q_proj"):
        raise ConfigError(
            f"init=target: layer {index} of the target has no self_attn.q_proj to copy; "
            "use init=random"
        )
    ours = drafter.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        got, want = getattr(attention, name).weight.shape, getattr(ours, name).weight.shape
        if got != want:
            raise ConfigError(
                f"init=target: {name} of the target's layer {index} is {tuple(got)}, the "
                f"drafter's {tuple(want)}; leave the drafter's heads at the target's, or use "
                "init=random"
            )
