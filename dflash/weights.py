"""Tensors on disk: one ``.safetensors`` file, or several with an index that says which holds what.

Reading is by tensor, so that a checkpoint can be looked through without holding all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "StoredWeights",
    "floating",
    "flush",
    "replace_file",
    "write_weights",
]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of one directory, by name; nothing is read before it is asked for."""

    path: Path
    """The file that errors name: the weights, or the index of several."""
    files: Mapping[str, Path]
    """The file of each tensor."""

    @classmethod
    def open(cls, directory: Path) -> StoredWeights:
        """Raises CheckpointError when files are missing or damaged, or the index contradicts them.

        With an index beside a single file the index counts, as it does for transformers.
        """
        index = directory / INDEX_NAME
        if index.is_file():
            return cls(index, _indexed(index))
        single = directory / WEIGHTS_NAME
        return cls(single, dict.fromkeys(_names(single), single))

    def load(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the type it has on disk."""
        with _opened(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, file by file; one at a time is in memory."""
        for path in sorted(set(self.files.values())):
            with _opened(path) as file:
                for name in sorted(name for name, where in self.files.items() if where == path):
                    yield name, file.get_tensor(name)


def write_weights(
    directory: Path, tensors: Mapping[str, Tensor], *, max_bytes: int | None = None
) -> None:
    """Write one file, or shards of at most ``max_bytes`` and their index.

    A tensor larger than ``max_bytes`` gets a shard of its own: tensors are never split. The
    directory must not hold weights of another layout already. Raises OSError.
    """
    shards = _shards(tensors, max_bytes)
    if len(shards) == 1:
        replace_file(directory / WEIGHTS_NAME, partial(_save, shards[0]))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        replace_file(directory / name, partial(_save, shard))
        weight_map |= dict.fromkeys(shard, name)
    index = {
        "metadata": {"total_size": sum(_size(tensor) for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    text = json.dumps(index, indent=2) + "\n"
    replace_file(directory / INDEX_NAME, lambda path: path.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside ``path``, flush it, and rename it: ``path`` is old or new, never half."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(scratch)
        flush(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Force a file's or a directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(dict(tensors), path, {"format": "pt"})


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shards(tensors: Mapping[str, Tensor], max_bytes: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        size = _size(tensor)
        if max_bytes is not None and shards[-1] and held + size > max_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += size
    return shards


def _indexed(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
    outside = sorted({str(path) for path in files.values() if path.parent != index.parent})
    if outside:
        raise CheckpointError(f"{index} names files outside its directory: {outside[0]}")
    for path in sorted(set(files.values())):
        held = set(_names(path))
        listed = {name for name, where in files.items() if where == path}
        if held != listed:
            odd = sorted(held ^ listed)
            raise CheckpointError(
                f"{index} and {path.name} disagree about {len(odd)} tensors: {odd[0]} is only in "
                f"{path.name if odd[0] in held else 'the index'}"
            )
    return files


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """``safe_open`` whose errors are ours."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no drafter in {path.parent}: {path.name} is missing"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def floating(tensor: Tensor) -> bool:
    """Whether it has a type that weights are kept in; quantised ones have not."""
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
