"""The one typed configuration of a training run: every setting, its default, its meaning.

`dflash.resolve` puts a configuration together from presets, files and the command line.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")


def _setting(default: _T, text: str) -> _T:
    """A field with a default and the sentence that `--help` shows for it."""
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True, frozen=True, slots=True)
class TargetSettings:
    """The frozen model that the drafter serves."""

    name: str = _setting(
        "smollm2", "smollm2, a directory of a transformers model, a .gguf file, or a hub id"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "for features and responses; auto = bfloat16 where the device is fast at it"
    )


@dataclass(kw_only=True, frozen=True, slots=True)
class DataSettings:
    """Conversations to train on and to evaluate on."""

    source: str = _setting(
        "humaneval",
        "humaneval, or JSONL or Parquet files, directories of them, saved or hub data sets, "
        "with commas between",
    )
    format: Literal["auto", "messages", "conversations", "prompt", "text"] = _setting(
        "auto", "what a row is; auto = by the fields it has"
    )
    fields: str = _setting(
        "", "names in the data: prompt=question,response=answer (also messages, role, content, ...)"
    )
    subset: str = _setting("", "configuration of a hub data set")
    split: str = _setting("train", "split of a data set")
    order: Literal["auto", "source", "shuffled"] = _setting(
        "auto",
        "of the rows before limit; shuffled = by the seed; auto = if there are several files",
    )
    duplicates: Literal["bad", "keep"] = _setting("bad", "what a repeated conversation is")
    marker: str = _setting(
        "", "of text rows: what an answer begins after; empty = the loss is over all of the text"
    )
    limit: int = _setting(0, "use the first so many conversations; 0 = all")
    held_out: int = _setting(16, "conversations kept out of training for the evaluation")
    max_length: int = _setting(3072, "tokens of a training sequence; longer ones are cut")
    on_bad: Literal["error", "skip"] = _setting("error", "what a bad row or sequence does")
    responses: Literal["missing", "always", "never"] = _setting(
        "missing", "which responses the target writes itself (greedy); always = all, anew"
    )
    max_new_tokens: int = _setting(2048, "tokens of a response that the target writes")
    response_batch: int = _setting(16, "prompts the target answers at once")


@dataclass(kw_only=True, frozen=True, slots=True)
class DrafterSettings:
    """Shape of the drafter. The rest (hidden size, heads, rope) is the target's."""

    layers: int = _setting(5, "decoder layers")
    taps: int = _setting(0, "target layers whose hidden states it reads; 0 = as many as layers")
    block_size: int = _setting(16, "tokens of a block, the anchor included")
    init: str = _setting(
        "random",
        "random, target (its first and last layers), or the directory of a drafter or a run",
    )
    mask_token_id: int = _setting(-1, "token that stands for 'to be drafted'; -1 = choose")


@dataclass(kw_only=True, frozen=True, slots=True)
class LossSettings:
    """Terms of the loss; each is a decayed mean over all drafters' supervised slots."""

    ce: float = _setting(1.0, "weight of the cross-entropy on the sequence's own tokens")
    kl: float = _setting(0.0, "weight of the distillation from the target's distribution")
    temperature: float = _setting(1.0, "of the distillation")
    gamma: float = _setting(
        0.0, "decay of the slot weights exp(-(k-1)/gamma); 0 = by block size (16: 7), inf = none"
    )
    head_vocab: Literal["full", "seen"] = _setting(
        "full", "rows of the head in the loss; seen = tokens of the responses + the target's top"
    )
    head_top: int = _setting(4, "with head_vocab=seen: the target's best so many per position")
    chunk: int = _setting(0, "slots whose logits exist at the same time; 0 = what fits a cache")


@dataclass(kw_only=True, frozen=True, slots=True)
class OptimSettings:
    """AdamW with warm-up and decay."""

    lr: float = _setting(6e-4, "peak learning rate")
    beta1: float = _setting(0.9, "AdamW")
    beta2: float = _setting(0.999, "AdamW")
    weight_decay: float = _setting(0.0, "of the matrices; norms have none")
    clip: float = _setting(1.0, "largest norm of the gradient; 0 = no limit")
    warmup: float = _setting(0.04, "part of the steps that warms up")
    schedule: Literal["cosine", "linear", "constant"] = _setting("cosine", "after the warm-up")
    min_lr: float = _setting(0.0, "learning rate at the end, as a part of the peak")


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainSettings:
    """The loop."""

    seed: int = _setting(0, "of everything random: split, order, anchors, initial weights")
    epochs: float = _setting(6.0, "visits of every sequence, where steps=0")
    steps: int = _setting(0, "optimizer steps; 0 = by epochs")
    batch: int = _setting(1, "sequences of one drafter at once")
    accumulate: int = _setting(1, "batches of each drafter per optimizer step")
    anchors: int = _setting(512, "blocks per sequence and visit")
    dtype: Literal["float32", "bfloat16"] = _setting(
        "bfloat16", "of the drafter's arithmetic; its weights and moments stay float32"
    )
    backend: Literal["auto", "inductor", "aot_eager", "eager", "off"] = _setting(
        "auto", "compiler of the drafter's layers; auto = inductor where a C++ compiler is"
    )
    log_every: int = _setting(10, "steps per logged line")
    checkpoint_every: int = _setting(500, "steps per checkpoint")
    keep: int = _setting(2, "checkpoints kept")


@dataclass(kw_only=True, frozen=True, slots=True)
class FeaturesSettings:
    """The hand-over of hidden states."""

    cache: Literal["auto", "memory", "off"] = _setting(
        "auto", "keep features for later epochs; auto = memory where they fit in cache_gb"
    )
    cache_gb: float = _setting(8.0, "see cache")
    batch: int = _setting(8, "sequences the target reads at once when it fills the cache")
    multiple: int = _setting(64, "sequence lengths are padded to multiples of this")
    buckets: int = _setting(4, "different padded lengths (each is one compiled shape)")
    queue: int = _setting(2, "batches that wait for a drafter at most")


@dataclass(kw_only=True, frozen=True, slots=True)
class PlacementSettings:
    """Which thread works where; one thread per named device."""

    targets: str = _setting("auto", "devices of the target workers: cuda:0,cuda:1 or cpu,cpu")
    drafters: str = _setting("auto", "devices of the drafter workers")
    threads: int = _setting(0, "CPU threads of one operation; 0 = cores / drafters")


@dataclass(kw_only=True, frozen=True, slots=True)
class EvalSettings:
    """The decoding of held-out prompts at the end."""

    max_new_tokens: int = _setting(2048, "tokens of a response")
    prompts: int = _setting(0, "held-out prompts to decode; 0 = all of them")
    dtype: Literal["float32", "bfloat16"] = _setting(
        "float32", "of target and drafter; equality with greedy is a float32 promise"
    )
    threads: int = _setting(0, "CPU threads; 0 = one or all cores, whichever decodes faster")


@dataclass(kw_only=True, frozen=True, slots=True)
class Config:
    """Everything a run depends on. `resolve` builds it, `to_dict` is what `config.json` holds."""

    target: TargetSettings = field(default_factory=TargetSettings)
    data: DataSettings = field(default_factory=DataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    features: FeaturesSettings = field(default_factory=FeaturesSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values, ready for JSON (which has no infinity: that is text)."""
        return {
            section.name: {f.name: _plain(getattr(part, f.name)) for f in fields(part)}
            for section in fields(self)
            for part in [getattr(self, section.name)]
        }


def _plain(value: Any) -> Any:
    return "inf" if value == math.inf else value


# "paper" is the recipe of arXiv 2602.06036, appendix A.1: these are the defaults above.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    # Two CPU cores and ten minutes: short answers in the target's own words, a small drafter that
    # starts as the target's first and last layer, every feature computed once, and a loss over the
    # tokens that occur. docs/quickstart-recipe.md has the measurements behind each value.
    "quickstart": {
        "data.max_length": 512,
        "data.responses": "always",
        "data.max_new_tokens": 96,
        "drafter.layers": 2,
        "drafter.taps": 5,
        "drafter.block_size": 4,
        "drafter.init": "target",
        "loss.ce": 0.0,
        "loss.kl": 1.0,
        "loss.head_vocab": "seen",
        "optim.lr": 1e-3,
        "optim.beta2": 0.95,
        "train.steps": 240,
        "train.batch": 4,
        "train.anchors": 32,
        "train.dtype": "float32",
        "train.checkpoint_every": 50,
        "train.log_every": 10,
        "features.buckets": 2,
        "eval.max_new_tokens": 48,
    },
}

# Where, how often and how loudly: these cannot change a loss, so a resumed run may change them.
RESUMABLE = frozenset(
    {
        "placement.targets",
        "train.log_every",
        "train.checkpoint_every",
        "train.keep",
        "features.cache_gb",
        "features.queue",
        "eval.max_new_tokens",
        "eval.prompts",
        "eval.dtype",
        "eval.threads",
    }
)


def settings() -> dict[str, tuple[Any, Any, str]]:
    """`section.key` -> (type, default, help) of every setting, in order."""
    found: dict[str, tuple[Any, Any, str]] = {}
    sections = typing.get_type_hints(Config)
    for section in fields(Config):
        hints = typing.get_type_hints(sections[section.name])
        for item in fields(sections[section.name]):
            name = f"{section.name}.{item.name}"
            found[name] = (hints[item.name], item.default, item.metadata["help"])
    return found
