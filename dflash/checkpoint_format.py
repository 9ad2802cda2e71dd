"""Drafters on disk: written in z-lab's layout, read in any of those that `dflash.formats` knows.

Each file is written beside its place, flushed to the disk and renamed, so that a reader or a
crash sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.drafter import Backend, Drafter
from dflash.drafter_config import DrafterConfig
from dflash.entry_kinds import entry_problems
from dflash.errors import CheckpointError, ConfigError
from dflash.formats import EMBED_NAME, HEAD_NAME, OWN_TENSORS, Layout, our_name, recognise, to_zlab
from dflash.weights import (
    INDEX_NAME,
    WEIGHTS_NAME,
    StoredWeights,
    floating,
    flush,
    replace_file,
    write_weights,
)

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "Checkpoint", "FrozenWeights", "TargetShape"]
__all__ += ["check_names", "check_target", "expected_tensors", "find_checkpoint", "load_drafter"]
__all__ += ["missing_own", "type_problem", "with_tied_head"]
__all__ += [
    "own_mismatches",
    "read_checkpoint",
    "read_raw_config",
    "save_drafter",
    "target_differences",
]

CONFIG_NAME = "config.json"
_STEP = re.compile(r"step-(\d{6,})$")


class TargetShape(Protocol):
    """The part of a target's spec that its drafters depend on; ``TargetSpec`` has it."""

    @property
    def name(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class FrozenWeights(Protocol):
    """The target's embedding and head, ``[V, H]`` each; ``Target`` has them."""

    @property
    def embed_weight(self) -> Tensor: ...

    @property
    def head_weight(self) -> Tensor: ...


@dataclass(frozen=True)
class Checkpoint:
    """A drafter on disk that was read and fits its own config."""

    path: Path
    layout: Layout
    raw: Mapping[str, Any]
    """``config.json`` as it is."""
    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    """The drafter's parameters under our names, in the type on disk."""
    own: Mapping[str, Tensor]
    """What it holds beside them: embedding, head, and maps of a smaller head."""


def save_drafter(
    drafter: Drafter,
    directory: str | Path,
    config_extra: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the drafter to ``directory``, which appears whole or, if it was there, file by file.

    ``config_extra`` is added to ``config.json`` (provenance, for instance). ``dtype`` is that of
    the stored weights; float32 keeps a master copy exactly. Raises CheckpointError when
    ``config_extra`` would overwrite an entry of the format or the directory cannot be written.
    """
    config = drafter.config.to_zlab_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    clash = sorted(set(config) & set(config_extra or {}))
    if clash:
        raise CheckpointError(f"config_extra would overwrite {', '.join(clash)} of the format")
    config |= dict(config_extra or {})
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    place = Path(directory)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            _write_files(place, config, tensors)
            return
        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            scratch.chmod(0o755)
            _write_files(scratch, config, tensors)
            scratch.rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        flush(place.parent)
    except OSError as error:
        raise CheckpointError(f"the drafter cannot be written to {place}: {error}") from error


def find_checkpoint(path: str | Path) -> Path:
    """The directory of a drafter: ``path`` itself, or the newest checkpoint of the run there.

    Raises CheckpointError for a run without checkpoints and for what is no directory.
    """
    place = Path(path)
    if not place.is_dir():
        raise CheckpointError(f"there is no directory {place}: name a drafter's, or a run's")
    runs = place / "checkpoints"
    if not runs.is_dir():
        return place
    steps = {int(m.group(1)): d for d in runs.iterdir() if (m := _STEP.match(d.name))}
    if not steps:
        raise CheckpointError(
            f"the run {place} has no checkpoint yet; one is written every train.checkpoint_every "
            "steps and at the end"
        )
    return steps[max(steps)]


def read_checkpoint(
    directory: str | Path,
    *,
    target: TargetShape | None = None,
    frozen: FrozenWeights | None = None,
) -> Checkpoint:
    """Read a drafter in any layout of `dflash.formats`; which one is seen from its files.

    ``target`` is what the drafter shall serve and supplies the number of its layers where the
    layout leaves it out; ``frozen`` are the target's weights. Raises CheckpointError when a file
    is missing or damaged, when names or shapes of tensors differ from what the config asks for,
    when the drafter is for another target, or brings another embedding or head than ``frozen``.
    """
    place = find_checkpoint(directory)
    path = place / CONFIG_NAME
    raw = read_raw_config(path)
    if bad := entry_problems(raw):
        raise CheckpointError(f"{path}: {_few(bad)}")
    weights = StoredWeights.open(place)
    layout = recognise(raw, weights.files)
    try:
        config = DrafterConfig.from_zlab_dict(
            to_zlab(raw, layout, None if target is None else target.num_layers)
        )
        wanted = expected_tensors(config)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if target is not None:
        check_target(config, target, where=place)
    stored = {our_name(name, layout): tensor for name, tensor in weights.items()}
    own = {name: stored.pop(name) for name in OWN_TENSORS & set(stored)}
    problems = check_names({n: tuple(t.shape) for n, t in stored.items()}, wanted)
    problems += [type_problem(n, t) for n, t in stored.items() if not floating(t)]
    problems += [f"{name} is missing" for name in missing_own(raw, layout, own)]
    own = with_tied_head(raw, own)
    if frozen is not None:
        problems += own_mismatches(own, frozen)
    if problems:
        raise CheckpointError(f"{weights.path}: {_few(problems)}")
    return Checkpoint(place, layout, raw, config, stored, own)


def load_drafter(
    directory: str | Path,
    *,
    target: TargetShape | None = None,
    frozen: FrozenWeights | None = None,
    dtype: torch.dtype | None = torch.float32,
    backend: Backend = "sdpa",
) -> tuple[Drafter, DrafterConfig]:
    """The drafter of `read_checkpoint`, ready to train or to decode; ours or a published one.

    ``dtype=None`` keeps the stored one. Raises what read_checkpoint raises.
    """
    found = read_checkpoint(directory, target=target, frozen=frozen)
    with torch.device("meta"):
        drafter = Drafter(found.config, backend=backend)
    stored = dict(found.tensors)
    if dtype is not None:
        stored = {name: tensor.to(dtype) for name, tensor in stored.items()}
    drafter.load_state_dict(stored, assign=True)
    for parameter in drafter.parameters():
        parameter.requires_grad_()
    return drafter, found.config


def check_target(config: DrafterConfig, target: TargetShape, *, where: str | Path) -> None:
    """Raise CheckpointError, naming both sides, if the drafter is for another target."""
    wrong = target_differences(config, target)
    if wrong:
        raise CheckpointError(
            f"the drafter in {where} was trained for another target than {target.name!r}: its "
            f"target has {'; '.join(wrong)}. Use the target it was trained for, or train a new one"
        )


def target_differences(config: DrafterConfig, target: TargetShape) -> list[str]:
    """In which sizes the drafter's target and this one differ, in words."""
    pairs = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("layers", config.num_target_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.vocab_size),
    )
    return [f"{what} {ours}, not {theirs}" for what, ours, theirs in pairs if ours != theirs]


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter. Raises ConfigError for a rope that is not known."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Drafter(config).state_dict().items()}


def check_names(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What is wrong with names and shapes, one sentence each; a likely renaming is said.

    >>> check_names({"w": (2,), "x": (1,)}, {"v": (2,), "x": (3,)})
    ['v is missing; was it renamed to w?', 'x has shape (1,), the config asks for (3,)']
    """
    unknown = sorted(set(stored) - set(wanted))
    problems = []
    for name in sorted(set(wanted) - set(stored)):
        alike = [other for other in unknown if stored[other] == wanted[name]]
        near = difflib.get_close_matches(name, alike, n=1, cutoff=0.0)
        if near:
            unknown.remove(near[0])
            problems.append(f"{name} is missing; was it renamed to {near[0]}?")
        else:
            problems.append(f"{name} is missing")
    problems += [f"{name} is unknown" for name in unknown]
    problems += [
        f"{name} has shape {stored[name]}, the config asks for {shape}"
        for name, shape in wanted.items()
        if stored.get(name, shape) != shape
    ]
    return problems


def missing_own(raw: Mapping[str, Any], layout: Layout, own: Collection[str]) -> list[str]:
    """Which of embedding and head the layout promises and the drafter lacks.

    A head that is tied to the embedding need not be stored.
    """
    if layout != "speculators":
        return []
    needed = [EMBED_NAME] if raw.get("tie_word_embeddings") else [EMBED_NAME, HEAD_NAME]
    return [name for name in needed if name not in own]


def with_tied_head(raw: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Embedding and head, the latter being the embedding where the config ties them."""
    if raw.get("tie_word_embeddings") and EMBED_NAME in own:
        return {HEAD_NAME: own[EMBED_NAME], **own}
    return dict(own)


def type_problem(name: str, tensor: Tensor) -> str:
    """The sentence for a tensor that `weights.floating` refuses."""
    return f"{name} has type {tensor.dtype}: quantised weights cannot be read"


def own_mismatches(own: Mapping[str, Tensor], frozen: FrozenWeights) -> list[str]:
    """How a drafter's embedding and head differ from the target's, one sentence each.

    They are compared in the coarser of both types. A head with fewer rows than the target's
    (``d2t[i]`` is what to add to row i for its token) is compared row by row.
    """
    problems = []
    for name, theirs in ((EMBED_NAME, frozen.embed_weight), (HEAD_NAME, frozen.head_weight)):
        if name not in own:
            continue
        mine, theirs = own[name], theirs.detach().cpu()
        if name == HEAD_NAME and "d2t" in own:
            rows = torch.arange(len(own["d2t"])) + own["d2t"].long()
            if len(rows) != len(mine) or int(rows.min()) < 0 or int(rows.max()) >= len(theirs):
                problems.append("d2t does not map lm_head.weight's rows to tokens of the target")
                continue
            theirs = theirs[rows]
        if mine.shape != theirs.shape:
            problems.append(
                f"{name} has shape {tuple(mine.shape)}, the target's {tuple(theirs.shape)}"
            )
            continue
        coarse = _coarser(mine.dtype, theirs.dtype)
        rows_off = (mine.to(coarse) != theirs.to(coarse)).any(dim=-1)
        if bool(rows_off.any()):
            problems.append(
                f"{name} differs from the target's in {int(rows_off.sum())} of {len(rows_off)} rows"
            )
    return problems


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def read_raw_config(path: Path) -> dict[str, Any]:
    """The JSON object in a ``config.json``. Raises CheckpointError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no drafter in {path.parent}: {path.name} is missing"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, not a JSON object")
    return raw


def _few(problems: list[str], count: int = 8) -> str:
    shown = "; ".join(problems[:count])
    return shown if len(problems) <= count else f"{shown}; and {len(problems) - count} more"


def _write_files(place: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    text = json.dumps(config, indent=2) + "\n"
    write_weights(place, tensors)
    (place / INDEX_NAME).unlink(missing_ok=True)  # of older, sharded weights: it would count
    replace_file(place / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    flush(place)
