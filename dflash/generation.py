"""`dflash.generate`: text of many prompts at once, with a drafter or without, greedy or sampled.

The loop is the paper's (section 3), for rows of any length: each round drafts a block for every
row, verifies it in one forward of the target, and moves each row on by what it accepted. A row that
ends gives its place to the next prompt.

Legend: b rows, W block slots, P prompt tokens, F features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dflash.block_policy import BlockPolicy
from dflash.decode import DecodeTarget, check_drafter
from dflash.drafter import Drafter
from dflash.errors import GenerationError
from dflash.prompts import Prompt, prompt_tokens
from dflash.round import Round, compiled_length, compiled_round
from dflash.rows import DraftRows, target_rows
from dflash.sampling import Proposal, Sampling, choose
from dflash.schedule import stable_seed
from dflash.stopping import StopStrings

__all__ = ["Completion", "generate"]

Finish = Literal["stop_token", "stop_string", "length", "context"]

# Cached positions are read up to the next multiple of this, so that shapes repeat.
_REACH_STEP = 64


@dataclass(frozen=True)
class Completion:
    """What was written after one prompt, and what it took."""

    ids: list[int]
    """New tokens, with the stop token or the tokens of the stop string that ended them."""
    text: str | None
    """Without special tokens and up to the stop string; None where there is no tokenizer."""
    finish: Finish
    """What ended it; ``context``: the model's positions were used up before max_new_tokens."""
    stop: int | str | None
    """The stop token or string that was met."""
    prompt_tokens: int
    accept_lengths: list[int] = field(default_factory=list)
    """Accepted drafts + 1 of each round with a drafted block."""
    calls: int = 0
    """Forward passes of the target that this row took part in, the prompt's included."""
    ties: list[int] = field(default_factory=list)
    """Indices in ``ids`` whose choice was within the rounding of the target's type."""
    seconds: float = 0.0
    """From the start of its prompt's forward to its last token."""
    first_token_seconds: float = 0.0
    """From the same start to the first token."""


@torch.no_grad()
def generate(
    target: DecodeTarget,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    proposal: Proposal = "greedy",
    stop_token_ids: Collection[int] | None = None,
    stop: Sequence[str] = (),
    block_size: int | None = None,
    adaptive: bool = True,
    batch_size: int = 8,
    seed: int = 0,
    compile: bool | str = False,
    thinking: bool = False,
) -> list[Completion]:
    """Write after every prompt; the completions come in the prompts' order.

    A prompt is token ids, a text (taken as it is), or messages (rendered by the target's chat
    template, ``thinking`` as its ``enable_thinking``). A drafter changes how long it takes, not
    what is written: at temperature 0 the target's own greedy text, above it a text with the
    target's own distribution, and for greedy proposals the very text that ``seed`` gives without
    a drafter. ``drafter=None`` or ``block_size=1`` decodes with the target alone.

    A text ends with the first of ``stop_token_ids`` (default: the target's end tokens), where a
    text of ``stop`` is complete, after ``max_new_tokens``, or with the model's last position.
    ``block_size`` is at most the trained one. With ``adaptive`` narrower blocks, or none, are used
    while wide ones do not pay (see `BlockPolicy`); at a temperature with sampled proposals the text
    then depends on the machine's speed too, its distribution does not. ``batch_size`` prompts are
    written at once. ``compile`` compiles the rounds (True = inductor, or a backend's name).

    Raises GenerationError for a prompt that is empty or leaves no room, for a value outside its
    range, and for a drafter of another target.
    """
    sampling = Sampling(temperature, top_k, top_p, proposal)
    if max_new_tokens < 1:
        raise GenerationError(f"max_new_tokens is {max_new_tokens}; it must be >= 1")
    if batch_size < 1:
        raise GenerationError(f"batch_size is {batch_size}; it must be >= 1")
    if block_size == 1:
        drafter = None
    width = 1 if drafter is None else check_drafter(target, drafter, block_size)
    tokenizer, spec = getattr(target, "tokenizer", None), getattr(target, "spec", None)
    tokens = [prompt_tokens(tokenizer, p, n, thinking=thinking) for n, p in enumerate(prompts)]
    context = getattr(spec, "max_position_embeddings", None)
    limits = [_limit(n, ids, max_new_tokens, context) for n, ids in enumerate(tokens)]
    if not tokens:
        return []
    stops = getattr(spec, "eos_ids", ()) if stop_token_ids is None else stop_token_ids
    batch = _Batch(
        target,
        drafter,
        sampling,
        tokens,
        limits,
        asked=max_new_tokens,
        stop_ids=frozenset(stops),
        strings=StopStrings(tokenizer, stop),
        policy=BlockPolicy(width, adaptive=adaptive),
        rows=min(batch_size, len(tokens)),
        seed=seed,
        backend="inductor" if compile is True else compile or None,
    )
    return batch.run()


class _Row:
    """One text in the making."""

    def __init__(self, number: int, prompt_len: int, limit: int) -> None:
        self.number = number
        self.prompt_len = prompt_len
        self.limit = limit
        self.ids: list[int] = []
        self.accept_lengths: list[int] = []
        self.ties: list[int] = []
        self.calls = 1
        self.begun = time.perf_counter()
        self.first_token_seconds = 0.0

    @property
    def start(self) -> int:
        """Position of the newest token: so many tokens are in the caches."""
        return self.prompt_len + len(self.ids) - 1


class _Batch:
    """All prompts of a call, so many at a time as there are rows."""

    def __init__(
        self,
        target: DecodeTarget,
        drafter: Drafter | None,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        asked: int,
        stop_ids: frozenset[int],
        strings: StopStrings,
        policy: BlockPolicy,
        rows: int,
        seed: int,
        backend: str | None,
    ) -> None:
        self._target = target
        self._prompts, self._limits, self._asked = prompts, limits, asked
        self._stop_ids, self._strings = stop_ids, strings
        self._sampling, self._seed = sampling, seed
        self._policy = policy
        self._width = max(policy.widths)
        # The last block may begin with the last token, and is written whole.
        longest = max(len(p) + n for p, n in zip(prompts, limits, strict=True)) + self._width
        # Compiled rounds go on with rows that have ended, behind their last block.
        self._max_len = compiled_length(longest + self._width) if backend else longest
        self._reach = self._max_len if backend else None
        self._rows = target_rows(target, rows, self._max_len)
        self._draft_rows = None if drafter is None else DraftRows(drafter, rows, self._max_len)
        work = Round(target, drafter, self._rows, self._draft_rows, sampling)
        self._round = compiled_round(work, backend) if backend else work.run
        self._static = backend is not None
        self._active: list[_Row] = []
        self._next = 0
        self._done: dict[int, Completion] = {}
        device = target.device
        self._anchors_b = torch.zeros(rows, dtype=torch.long, device=device)
        self._starts_b = torch.zeros(rows, dtype=torch.long, device=device)
        # Three uniform numbers for each new token, and for those that a last block overshoots.
        numbers = 0 if sampling.greedy else max(limits) + self._width + 1
        self._uniforms_bN3 = torch.zeros(rows, numbers, 3, dtype=torch.float64, device=device)

    def run(self) -> list[Completion]:
        rows = len(self._anchors_b)
        while len(self._done) < len(self._prompts):
            while len(self._active) < rows and self._next < len(self._prompts):
                self._begin(len(self._active))
            if self._active:
                self._advance()
        return [self._done[number] for number in range(len(self._prompts))]

    def _begin(self, place: int) -> None:
        """Read the next prompt into the row at ``place``; its first token comes of that."""
        number = self._next
        self._next += 1
        prompt = self._prompts[number]
        row = _Row(number, len(prompt), self._limits[number])
        logits_1V, context_1PF = self._rows.prefill(place, prompt, self._draft_rows is not None)
        if self._draft_rows is not None:
            assert context_1PF is not None
            first = torch.zeros(1, dtype=torch.long, device=self._target.device)
            self._draft_rows.append(context_1PF, first, place)
        uniform = None
        if not self._sampling.greedy:
            self._uniforms_bN3[place] = self._numbers(number)
            uniform = self._uniforms_bN3[place, :1, 2]
        token, tie = choose(logits_1V, self._sampling, uniform, self._target.dtype)
        self._anchors_b[place] = token[0]
        self._starts_b[place] = len(prompt)
        row_tokens, row_ties = [int(token)], [bool(tie)]
        row.first_token_seconds = time.perf_counter() - row.begun
        if not self._extend(row, row_tokens, row_ties):
            self._active.append(row)

    def _numbers(self, number: int) -> Tensor:
        """A prompt's own: they depend on the seed and its index, not on its neighbours."""
        generator = torch.Generator().manual_seed(stable_seed(self._seed, "generate", number))
        shape = self._uniforms_bN3.shape[1:]
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    def _advance(self) -> None:
        """One round of all rows."""
        active, width = self._active, self._policy.next()
        rows = len(self._anchors_b) if self._static else len(active)
        anchors_b, starts_b = self._anchors_b[:rows], self._starts_b[:rows]
        starts = [row.start for row in active]
        reach = self._reach or min(
            self._max_len, -(-(max(starts) + width) // _REACH_STEP) * _REACH_STEP
        )
        begun = time.perf_counter()
        found = self._round(anchors_b, starts_b, self._uniforms(rows, width), width, reach, starts)
        # The next anchors are known on the device before the host knows them.
        accepted_b = found[:, 0]
        anchors_b.copy_(found[:, 1:].gather(1, accepted_b.unsqueeze(1)).squeeze(1))
        if self._static:  # rows without a text stand still, so that they never leave the cache
            alive = torch.arange(rows, device=found.device) < len(active)
            starts_b += (accepted_b + 1) * alive
        else:
            starts_b += accepted_b + 1
        results: list[list[int]] = found.tolist()[: len(active)]
        lengths = [result[0] + 1 for result in results]
        self._policy.record(width, lengths, time.perf_counter() - begun)
        ended = []
        for row, result, length in zip(active, results, lengths, strict=True):
            row.calls += 1
            if width > 1:
                row.accept_lengths.append(length)
            ties = [bool(tie) for tie in result[1 + width : 1 + width + length]]
            ended.append(self._extend(row, result[1 : 1 + length], ties))
        self._compact(ended)

    def _uniforms(self, rows: int, width: int) -> Tensor | None:
        """The numbers of the tokens behind each slot of the coming block, ``[b, W, 3]``."""
        if self._sampling.greedy:
            return None
        device = self._target.device
        counts = [len(row.ids) for row in self._active]
        counts += [1] * (rows - len(counts))
        index_bW = torch.tensor(counts, device=device).unsqueeze(1) + torch.arange(
            width, device=device
        )
        return self._uniforms_bN3[:rows].gather(1, index_bW.unsqueeze(-1).expand(-1, -1, 3))

    def _extend(self, row: _Row, tokens: Sequence[int], ties: Sequence[bool]) -> bool:
        """Append tokens as decoding one at a time would; True when that ends the text."""
        before = len(row.ids)
        finish: Finish | None = None
        stop: int | str | None = None
        for token in tokens:
            row.ids.append(token)
            if token in self._stop_ids:
                finish, stop = "stop_token", token
            elif len(row.ids) == row.limit:
                finish = "length"
            if finish is not None:
                break
        found = self._strings.find(row.ids, len(row.ids) - before)
        if found is not None:
            del row.ids[found[0] :]
            finish, stop = "stop_string", found[1]
        row.ties += [before + i for i in range(len(row.ids) - before) if ties[i]]
        if finish is None:
            return False
        if finish == "length" and row.limit < self._asked:
            finish = "context"
        self._done[row.number] = Completion(
            ids=row.ids,
            text=self._strings.text(row.ids),
            finish=finish,
            stop=stop,
            prompt_tokens=row.prompt_len,
            accept_lengths=row.accept_lengths,
            calls=row.calls,
            ties=row.ties,
            seconds=time.perf_counter() - row.begun,
            first_token_seconds=row.first_token_seconds,
        )
        return True

    def _compact(self, ended: Sequence[bool]) -> None:
        """Close the gaps that ended rows leave, with rows from the end."""
        places = [place for place, end in enumerate(ended) if end]
        for place in reversed(places):
            last = len(self._active) - 1
            if place != last:
                self._active[place] = self._active[last]
                self._rows.move(last, place)
                if self._draft_rows is not None:
                    self._draft_rows.move(last, place)
                for tensor in (self._anchors_b, self._starts_b, self._uniforms_bN3):
                    tensor[place] = tensor[last].clone()
            self._active.pop()


def _limit(number: int, ids: Sequence[int], max_new_tokens: int, context: int | None) -> int:
    """New tokens that the prompt leaves room for, ``max_new_tokens`` at most."""
    if context is None:
        return max_new_tokens
    if len(ids) >= context:
        raise GenerationError(
            f"prompt {number} has {len(ids)} tokens and the target {context} positions: nothing "
            "can be written behind it; shorten the prompt"
        )
    return min(max_new_tokens, context - len(ids))
