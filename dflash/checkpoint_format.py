"""Drafters on disk, in z-lab's layout: ``config.json`` and ``model.safetensors``.

Each file is written beside its place, flushed to the disk and renamed, so that a reader or a
crash sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.drafter import Backend, Drafter
from dflash.drafter_config import DrafterConfig
from dflash.errors import CheckpointError, ConfigError

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "TargetShape", "check_target", "load_drafter"]
__all__ += ["save_drafter"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


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
        _flush(place.parent)
    except OSError as error:
        raise CheckpointError(f"the drafter cannot be written to {place}: {error}") from error


def load_drafter(
    directory: str | Path,
    *,
    target: TargetShape | None = None,
    dtype: torch.dtype | None = torch.float32,
    backend: Backend = "sdpa",
) -> tuple[Drafter, DrafterConfig]:
    """Read a drafter in z-lab's layout, ours or a published one.

    ``dtype=None`` keeps the stored one. Raises CheckpointError when a file is missing or damaged,
    when names or shapes of tensors differ from what the config asks for, and, given ``target``,
    when the drafter was trained for another one.
    """
    place = Path(directory)
    config = _read_config(place / CONFIG_NAME)
    if target is not None:
        check_target(config, target, where=place)
    stored = _read_tensors(place / WEIGHTS_NAME)
    with torch.device("meta"):
        try:
            drafter = Drafter(config, backend=backend)
        except ConfigError as error:
            raise CheckpointError(f"{place / CONFIG_NAME}: {error}") from error
    _check_tensors(stored, drafter.state_dict(), place / WEIGHTS_NAME)
    if dtype is not None:
        stored = {name: tensor.to(dtype) for name, tensor in stored.items()}
    drafter.load_state_dict(stored, assign=True)
    for parameter in drafter.parameters():
        parameter.requires_grad_()
    return drafter, config


def check_target(config: DrafterConfig, target: TargetShape, *, where: str | Path) -> None:
    """Raise CheckpointError, naming both sides, if the drafter is for another target."""
    pairs = (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("layers", config.num_target_layers, target.num_layers),
        ("vocabulary", config.vocab_size, target.vocab_size),
    )
    wrong = [f"{what} {ours}, not {theirs}" for what, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise CheckpointError(
            f"the drafter in {where} was trained for another target than {target.name!r}: its "
            f"target has {'; '.join(wrong)}. Use the target it was trained for, or train a new one"
        )


def _read_config(path: Path) -> DrafterConfig:
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
    try:
        return DrafterConfig.from_zlab_dict(raw)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no drafter in {path.parent}: {path.name} is missing"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return tensors


def _check_tensors(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    missing = sorted(set(wanted) - set(stored))
    unknown = sorted(set(stored) - set(wanted))
    if missing or unknown:
        raise CheckpointError(
            f"{path} has other tensors than its config asks for: missing {_few(missing)}, "
            f"unknown {_few(unknown)}"
        )
    for name, tensor in wanted.items():
        if stored[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(stored[name].shape)}, "
                f"the config asks for {tuple(tensor.shape)}"
            )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _write_files(place: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    text = json.dumps(config, indent=2) + "\n"
    _replace(place / WEIGHTS_NAME, lambda path: save_file(dict(tensors), path, {"format": "pt"}))
    _replace(place / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    _flush(place)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(scratch)
        _flush(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Force a file's or a directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
