"""Checkpoints of a run: the drafter in z-lab's layout, and beside it all that goes on from there.

    checkpoints/step-000500/
        config.json, model.safetensors     what a server loads
        train_state.safetensors            float32 weights and AdamW's moments, flat
        train_state.json                   step, the schedule's fingerprint, the layout's

Everything random in a run is a function of the seed and the step, so no generator is saved. The
directory is written under another name, flushed, and renamed: it is complete or it is not there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.checkpoint_format import save_drafter
from dflash.errors import CheckpointError
from dflash.run_dir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from dflash.flat import FlatParameters
    from dflash.replica import Replica

_TENSORS = "train_state.safetensors"
_FACTS = "train_state.json"


def save_checkpoint(run: RunDir, replica: Replica, *, schedule: str, keep: int) -> Path:
    """Write the replica's state after its last completed step; older ones than `keep` go.

    `schedule` is the fingerprint of the batches the run sees.
    """
    final = run.checkpoint(replica.completed)
    if final.exists():  # the same step of the same run: it holds the same
        return final
    temporary = run.checkpoints / f".writing-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    save_drafter(replica.drafter, temporary, {})
    save_file({name: t.cpu() for name, t in replica.tensors().items()}, temporary / _TENSORS)
    facts = {"step": replica.completed, "schedule": schedule, "layout": replica.flat.layout}
    write_json(temporary / _FACTS, facts)
    _flush(temporary / _TENSORS)
    _flush(temporary)
    temporary.rename(final)
    _flush(run.checkpoints)
    run.keep_newest(keep)
    return final


def load_checkpoint(path: Path, replica: Replica, *, schedule: str) -> None:
    """Put the replica where it was. CheckpointError if it is damaged or of another run."""
    try:
        facts: dict[str, Any] = read_json(path / _FACTS)
        tensors = _read(path / _TENSORS)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {path} to go on from the one before it") from error
    for name, mine, meaning in (
        ("schedule", schedule, "batches (data, seed, batch size or number of drafters)"),
        ("layout", replica.flat.layout, "drafter shape"),
    ):
        if facts.get(name) != mine:
            raise CheckpointError(
                f"{path} was written with other {meaning}: {name} {facts.get(name)}, here {mine}"
            )
    replica.load(tensors, completed=int(facts["step"]))


def read_masters(path: Path, flat: FlatParameters) -> None:
    """Put a checkpoint's float32 weights into a drafter's flat vector. Raises CheckpointError."""
    values_P = _read(path).get("weights")
    if values_P is None or values_P.shape != flat.values_P.shape:
        raise CheckpointError(f"{path} holds no weights for a drafter of this shape")
    flat.values_P.copy_(values_P)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
