"""One round of decoding for all rows: draft a block, verify it, keep what is right.

The whole round runs on the device; the host reads one small tensor at its end. With fixed shapes it
can be compiled, and on CUDA captured as a graph.

Legend: b rows, W block slots (1 = no draft), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.decode import DecodeTarget
from dflash.drafter import Drafter
from dflash.rows import DraftRows, LeanRows, TargetRows
from dflash.sampling import Sampling, propose, verify

__all__ = ["Round", "compiled_length", "compiled_round"]

# Graphs of one function that torch.compile keeps, at least: one for each width, number of rows,
# length of the caches and way of sampling that a process uses. Its own limit of 8 is soon reached.
_GRAPHS = 64

# Compiled caches have one of few lengths: doublings of this.
_COMPILED_LENGTH = 256

Step = Callable[[Tensor, Tensor, "Tensor | None", int, int, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Round:
    """What a round works on. Without a drafter its width is always 1."""

    target: DecodeTarget
    drafter: Drafter | None
    rows: TargetRows
    draft_rows: DraftRows | None
    sampling: Sampling

    def run(
        self,
        anchors_b: Tensor,
        starts_b: Tensor,
        uniforms_bW3: Tensor | None,
        width: int,
        reach: int,
        starts: Sequence[int],
    ) -> Tensor:
        """``[b, 1 + 2 * W]`` int64: accepted drafts, the W tokens, and which of these are ties.

        ``anchors_b`` are the newest tokens, at positions ``starts``, not yet seen by the target.
        ``reach`` positions of the caches are read. ``uniforms_bW3`` belong to the tokens behind
        each slot.
        """
        block_bW, q = anchors_b.unsqueeze(1), None
        if width > 1:
            block_bW, q = self._draft(anchors_b, starts_b, uniforms_bW3, width, reach)
        logits_bWV, context_bWF = self.rows.step(
            block_bW, starts_b, starts, reach, self.draft_rows is not None
        )
        if self.draft_rows is not None:
            assert context_bWF is not None
            self.draft_rows.append(context_bWF, starts_b)
        found = verify(
            logits_bWV, block_bW[:, 1:], q, self.sampling, uniforms_bW3, self.target.dtype
        )
        return torch.cat(
            [found.accepted_b.unsqueeze(1), found.tokens_bW, found.ties_bW.long()], dim=1
        )

    def _draft(
        self,
        anchors_b: Tensor,
        starts_b: Tensor,
        uniforms_bW3: Tensor | None,
        width: int,
        reach: int,
    ) -> tuple[Tensor, Tensor | None]:
        assert self.drafter is not None
        assert self.draft_rows is not None
        masks = anchors_b.new_full((len(anchors_b), width - 1), self.drafter.config.mask_token_id)
        embeds_bWH = self.target.embed(torch.cat([anchors_b.unsqueeze(1), masks], dim=1))
        hidden_bWH = self.draft_rows.draft(embeds_bWH, starts_b, reach)
        # The draft in slot k is the token behind slot k - 1.
        uniform = None if uniforms_bW3 is None else uniforms_bW3[:, :-1, 0]
        drafted, q = propose(self.target.head(hidden_bWH[:, 1:]), self.sampling, uniform)
        return torch.cat([anchors_b.unsqueeze(1), drafted], dim=1), q


def compiled_length(positions: int) -> int:
    """Positions of a cache for a compiled round: few different ones, so few compilations."""
    length = _COMPILED_LENGTH
    while length < positions:
        length *= 2
    return length


def compiled_round(work: Round, backend: str) -> Step:
    """`work.run`, compiled for each width; on CUDA each width's kernels are also captured.

    ``reach`` must be the same in all calls. Where the target runs row by row (models that only
    transformers can run) there is no static round, and it stays as it is.
    """
    if not isinstance(work.rows, LeanRows):
        return work.run
    limits: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
    raised = {name: max(getattr(limits, name), _GRAPHS)}
    compiled: Any = torch.compile(work.run, backend=backend, dynamic=False, fullgraph=True)

    def run(*arguments: Any) -> Tensor:
        with limits.patch(raised):  # for our graphs only: the caller's limit is his
            output: Tensor = compiled(*arguments)
        return output

    if work.target.device.type != "cuda":
        return lambda *arguments: run(*arguments[:5], ())
    graphs: dict[tuple[int, int], _Captured] = {}

    def replay(
        anchors_b: Tensor,
        starts_b: Tensor,
        uniforms_bW3: Tensor | None,
        width: int,
        reach: int,
        _: Sequence[int],
    ) -> Tensor:
        key = (width, len(anchors_b))
        if key not in graphs:
            graphs[key] = _Captured(
                lambda *tensors: run(*tensors, width, reach, ()),
                (anchors_b, starts_b, uniforms_bW3),
            )
        return graphs[key](anchors_b, starts_b, uniforms_bW3)

    return replay


class _Captured:
    """A function of tensors as a CUDA graph: its kernels are launched all at once.

    Running the function again with the same inputs, as warming up does, must change nothing: a
    round writes the same keys and values to the same places.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]) -> None:
        self._inputs = tuple(None if each is None else each.clone() for each in inputs)
        device = next(each.device for each in self._inputs if each is not None)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and allocates what the libraries keep
                function(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(*self._inputs)

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        for kept, new in zip(self._inputs, inputs, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)
        self._graph.replay()
        return self._output.clone()
