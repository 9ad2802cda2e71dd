"""empty_batch: `default_collate([])` says "list index out of range".

That is what a DataLoader's worker reports for a dataset or a batch sampler that yields an empty
batch, and nothing in it names the batch. Here the error, still an IndexError, says what is empty.

`default_collate` is imported by name in several places of torch, so replacing it would miss them.
All of them end in `collate`, which looks itself up in its module: that one is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchcompat import Patch, Wrap


def _named(original: Callable[..., Any]) -> Callable[..., Any]:
    """`collate`, but an empty list or tuple gets an error that names it."""

    def collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if isinstance(batch, (list, tuple)) and not batch:
            raise IndexError(
                "the batch is empty: the dataset or the batch sampler gave no item to collate"
            )
        return original(batch, collate_fn_map=collate_fn_map)

    return collate


PATCHES = (
    Patch(
        id="example:empty_batch",
        title="Collating an empty batch must say so",
        why="default_collate([]) raises 'list index out of range', which names no batch.",
        # Only bounds with .dev0 mean the same for releases, nightlies and vendors' builds.
        affects=">=2.6.0.dev0",
        edits=(
            Wrap(
                target="torch.utils.data._utils.collate:collate",
                factory=_named,
                # What the target must look like, or the patch is "drifted" and left out.
                signature=("batch", "collate_fn_map"),
                anchors=("elem = batch[0]",),
            ),
        ),
        repro="repro/empty_batch.py",
    ),
)
