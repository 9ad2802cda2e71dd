"""`dflash export`: a drafter, ours or a published one, in the layout that a server wants.

The directory is written under another name beside its place and renamed: it is whole or not there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.checkpoint_format import (
    CONFIG_NAME,
    Checkpoint,
)
from dflash.drafter import Drafter
from dflash.errors import CheckpointError, ConfigError
from dflash.flat import FlatParameters
from dflash.formats import EMBED_NAME, HEAD_NAME, ExportLayout, export_config
from dflash.run_dir import read_json
from dflash.state import read_masters
from dflash.target import Target
from dflash.weights import INDEX_NAME, WEIGHTS_NAME, flush, replace_file, write_weights

__all__ = ["Exported", "Verifier", "check_out", "export_drafter", "with_masters"]

_STATE_NAME = "train_state.json"
_MASTERS_NAME = "train_state.safetensors"


@dataclass(frozen=True)
class Verifier:
    """The target, as far as speculators' layout holds it."""

    name: str
    architectures: tuple[str, ...]
    embed_weight: Tensor
    """``[V, H]``, as the head."""
    head_weight: Tensor

    @classmethod
    def of(cls, target: Target) -> Verifier:
        """A loaded target."""
        return cls(target.spec.name, target.architectures, target.embed_weight, target.head_weight)

    @classmethod
    def stored_in(cls, source: Checkpoint) -> Verifier:
        """What a drafter in speculators' layout brings along. ConfigError if it is not all."""
        stated = source.raw.get("speculators_config", {}).get("verifier", {})
        if not {EMBED_NAME, HEAD_NAME} <= set(source.own) or "d2t" in source.own or not stated:
            raise ConfigError(
                f"speculators' layout holds the target's embedding and head, and {source.path} "
                "does not have them in full; name the target: --target"
            )
        return cls(
            str(stated.get("name_or_path")),
            tuple(stated.get("architectures") or ()),
            source.own[EMBED_NAME],
            source.own[HEAD_NAME],
        )


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    layout: ExportLayout
    dtype: str
    parameters: int
    """Numbers of all tensors, embedding and head included."""
    size: int
    """Bytes of the weights."""
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.layout,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "bytes": self.size,
            "files": list(self.files),
        }


def export_drafter(
    source: Checkpoint,
    out: Path,
    layout: ExportLayout = "zlab",
    *,
    verifier: Verifier | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_bytes: int | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write ``source`` to the new directory ``out``.

    ``verifier`` is needed for speculators' layout, which holds the target's embedding and head,
    also where the two are tied. Shards are at most ``max_bytes`` large. With ``overwrite`` a
    drafter that is at ``out`` gives way to the new one. Raises ConfigError where ``out`` or the
    layout cannot be used and CheckpointError for numbers that ``dtype`` cannot hold and for a
    directory that cannot be written.
    """
    check_out(out, source.path, overwrite=overwrite)
    named = None if verifier is None else (verifier.name, verifier.architectures)
    config = export_config(source.config, layout, named)
    config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = dict(source.tensors)
    if layout == "speculators":
        assert verifier is not None  # export_config refuses it
        # Copies, so that a tied head is stored beside the embedding and not refused as its alias.
        tensors[EMBED_NAME] = verifier.embed_weight.detach().clone()
        tensors[HEAD_NAME] = verifier.head_weight.detach().clone()
    tensors = {name: _converted(name, tensor, dtype) for name, tensor in sorted(tensors.items())}
    extra = _code_files(source) if layout == "zlab" else {}
    if extra:
        config["auto_map"] = source.raw["auto_map"]
    try:
        files = _write(out, config, tensors, extra, max_bytes)
    except OSError as error:
        raise CheckpointError(f"the drafter cannot be written to {out}: {error}") from error
    return Exported(
        out,
        layout,
        config["dtype"],
        sum(tensor.numel() for tensor in tensors.values()),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        files,
    )


def check_out(out: Path, source: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if ``out`` must not be written: before any work is done.

    Only a drafter gives way to another one, never a directory with something else in it, a run's
    checkpoint, or the source itself.
    """
    if not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise ConfigError(f"{out} is there already: name another directory, or give --overwrite")
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents:
        raise ConfigError(f"{out} holds the source, {source}: name another directory")
    if out.is_symlink() or not out.is_dir():
        raise ConfigError(f"{out} is no directory: remove it yourself, or name another")
    if (out / _STATE_NAME).exists():
        raise ConfigError(f"{out} is a checkpoint of a run, which goes on from it; name another")
    names = {entry.name for entry in out.iterdir()}
    weights = {WEIGHTS_NAME, INDEX_NAME} & names
    if names and not (weights and CONFIG_NAME in names):
        raise ConfigError(f"{out} holds something else than a drafter; name another directory")


def with_masters(source: Checkpoint) -> Checkpoint:
    """The checkpoint with its float32 weights, if it is one of a run, which keeps them beside.

    Raises CheckpointError if they are damaged or of another drafter.
    """
    facts, masters = source.path / _STATE_NAME, source.path / _MASTERS_NAME
    if not (facts.exists() and masters.exists()):
        return source
    drafter = Drafter(source.config)
    flat = FlatParameters(drafter)
    if read_json(facts).get("layout") != flat.layout:
        raise CheckpointError(f"{facts} belongs to a drafter of another shape")
    read_masters(masters, flat)
    tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    return replace(source, tensors=tensors)


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    if not bool(torch.isfinite(stored).all()):
        origin = "already in the source" if not bool(torch.isfinite(tensor).all()) else "by dtype"
        raise CheckpointError(
            f"{name} would hold NaN or infinite numbers as {str(dtype).removeprefix('torch.')} "
            f"({origin}); nothing was written"
        )
    return stored


def _code_files(source: Checkpoint) -> dict[str, Path]:
    """The modules that the source's ``auto_map`` names; none if one of them is not there."""
    entries = source.raw.get("auto_map")
    if not isinstance(entries, Mapping):
        return {}
    found = {}
    for entry in entries.values():
        module = re.fullmatch(r"([A-Za-z_]\w*)\.\w+", str(entry))
        path = source.path / f"{module.group(1)}.py" if module else None
        if path is None or not path.is_file():
            return {}
        found[path.name] = path
    return found


def _write(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Path],
    max_bytes: int | None,
) -> tuple[str, ...]:
    """All files, at once; their names."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        scratch.chmod(0o755)
        write_weights(scratch, tensors, max_bytes=max_bytes)
        for name, path in extra.items():
            replace_file(scratch / name, partial(shutil.copyfile, path))
        text = json.dumps(config, indent=2) + "\n"
        replace_file(scratch / CONFIG_NAME, lambda to: to.write_text(text, encoding="utf-8"))
        flush(scratch)
        _put(scratch, out)
        flush(out.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return tuple(sorted(path.name for path in out.iterdir()))


def _put(scratch: Path, out: Path) -> None:
    """Rename into place. A directory cannot be replaced in one step, so an old one steps aside
    first and comes back if the new one cannot take its place."""
    if not out.exists():
        scratch.rename(out)
        return
    aside = out.with_name(f".{out.name}.old.{os.getpid()}")
    out.rename(aside)
    try:
        scratch.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
