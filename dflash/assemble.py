"""From a configuration to the parts of a run: the drafter's shape, the frozen weights, the copies.

Legend: H hidden, V vocabulary, R head rows in the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dflash.chat import Example
from dflash.checkpoint_format import load_drafter, read_checkpoint
from dflash.config import Config
from dflash.drafter import Backend, Drafter, DrafterConfig
from dflash.errors import ConfigError
from dflash.feature_store import FeatureStore
from dflash.geometry import decay_gamma, target_layer_ids
from dflash.head_rows import supervised_tokens, top_tokens
from dflash.init import init_from_target
from dflash.mask_token import MaskToken, choose_mask_token
from dflash.placement import on_device
from dflash.progress import ProgressBar
from dflash.replica import Replica
from dflash.schedule import stable_seed
from dflash.step import Frozen, LossTerms
from dflash.target import Target
from dflash.workers import StopSignal, share

__all__ = [
    "drafter_shape",
    "fill_features",
    "frozen_weights",
    "loss_terms",
    "make_replicas",
    "mask_token",
]


def mask_token(config: Config, target: Target, used: Collection[int]) -> MaskToken:
    """The mask token of this run; `used` are all tokens of its data. Raises ConfigError."""
    spec = target.spec
    return choose_mask_token(
        target.tokenizer,
        vocab_size=spec.vocab_size,
        reserved={*spec.eos_ids, spec.pad_id},
        used=used,
        asked=config.drafter.mask_token_id,
    )


def drafter_shape(config: Config, target: Target, mask_token_id: int) -> DrafterConfig:
    """The drafter's shape: that of the checkpoint it starts from, else the settings' and, in width,
    heads and rope, the target's. Raises ConfigError or CheckpointError."""
    spec, settings = target.spec, config.drafter
    if starts_from_checkpoint(settings.init):
        return read_checkpoint(settings.init, target=spec, frozen=target).config
    bos = getattr(target.tokenizer, "bos_token_id", None)
    return DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        num_target_layers=spec.num_layers,
        target_layer_ids=target_layer_ids(spec.num_layers, settings.taps or settings.layers),
        block_size=settings.block_size,
        mask_token_id=mask_token_id,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
        max_position_embeddings=spec.max_position_embeddings,
        bos_token_id=bos,
        eos_token_id=spec.eos_ids or None,
    )


def starts_from_checkpoint(init: str) -> bool:
    """Whether drafter.init names a directory. Raises ConfigError if it is nothing at all."""
    if init in ("random", "target"):
        return False
    if not Path(init).is_dir():
        raise ConfigError(
            f"drafter.init is {init!r}: not random, not target, and no directory with a drafter"
        )
    return True


def fill_features(
    store: FeatureStore,
    groups: int,
    targets: Sequence[Target],
    examples: Sequence[Example],
    *,
    top: int,
    stop: StopSignal,
) -> set[int]:
    """Let the targets read every group of sequences once, kept or not.

    Returns the `top` tokens that the target finds best wherever it predicts a supervised one;
    none for `top=0`.
    """
    best: list[set[int]] = [set() for _ in range(groups)]
    with ProgressBar("features", groups, "groups") as bar:

        def work(target: Target, number: int) -> None:
            with on_device(target.device):
                states = store.group(number, target)
                for index, last_LH in states.items():
                    if top and last_LH is not None:
                        last_LH = last_LH.to(target.device)
                        best[number] |= top_tokens(
                            last_LH, examples[index].loss_mask, target.head, top
                        )
            bar.advance()

        share(
            {f"target-{n}": partial(work, target) for n, target in enumerate(targets)},
            groups,
            stop=stop,
        )
    return set().union(*best)


def head_rows(examples: Sequence[Example], target: Target, best: Collection[int]) -> Tensor:
    """int64 `[R]`, ascending: tokens that the loss chooses between, end tokens included."""
    rows = supervised_tokens(examples) | set(best) | set(target.spec.eos_ids)
    return torch.tensor(sorted(rows), dtype=torch.long)


def frozen_weights(
    target: Target, devices: Sequence[torch.device], dtype: torch.dtype, rows_R: Tensor | None
) -> dict[torch.device, Frozen]:
    """The target's embedding and head on each drafter device, in the dtype of the products."""
    weights = {}
    for device in dict.fromkeys(devices):
        rows = None if rows_R is None else rows_R.to(device)
        weights[device] = Frozen(
            target.embed_weight.to(device, dtype), target.head_weight.to(device, dtype), rows
        )
    return weights


def loss_terms(config: Config, shape: DrafterConfig, attention: Backend) -> LossTerms:
    """The loss of the settings for blocks of the drafter's size."""
    settings = config.loss
    return LossTerms(
        num_anchors=config.train.anchors,
        gamma=settings.gamma or decay_gamma(shape.block_size),
        ce=settings.ce,
        kl=settings.kl,
        temperature=settings.temperature,
        chunk=settings.chunk or None,
        autocast=config.train.dtype == "bfloat16",
        attention=attention,
    )


def attention_kind(device: torch.device) -> Backend:
    """The drafter's attention that is fast on this kind of device."""
    return "flex" if device.type == "cuda" else "blocks"


def make_replicas(
    config: Config,
    shape: DrafterConfig,
    target: Target,
    devices: Sequence[torch.device],
    frozen: dict[torch.device, Frozen],
    sample_ids: Sequence[int],
) -> list[Replica]:
    """One copy of the drafter per device, all equal, compiled as train.backend says."""
    first = _first_drafter(config, shape, target, sample_ids)
    replicas = []
    for device in devices:
        attention = attention_kind(device)
        drafter = Drafter(shape, backend=attention)
        drafter.load_state_dict(first.state_dict())
        drafter.to(device)
        if config.train.backend != "off":
            drafter.compile_layers(backend=config.train.backend)
        terms = loss_terms(config, shape, attention)
        replicas.append(Replica(drafter, frozen[device], terms, config.optim))
    return replicas


def _first_drafter(
    config: Config, shape: DrafterConfig, target: Target, sample_ids: Sequence[int]
) -> Drafter:
    """The drafter before its first step, on the CPU in float32."""
    init = config.drafter.init
    if starts_from_checkpoint(init):
        return load_drafter(init, target=target.spec, frozen=target)[0]
    drafter = Drafter(shape)
    generator = torch.Generator().manual_seed(stable_seed(config.train.seed, "weights"))
    drafter.reset_parameters(generator)
    if init == "target":
        init_from_target(drafter, target, torch.tensor(sample_ids), generator)
    return drafter
