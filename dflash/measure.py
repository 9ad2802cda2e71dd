"""What a drafter is worth on a task: z-lab's protocol, and the figures that others report.

Every sample is decoded alone, greedily, with blocks of the full width, and again by the same loop
with blocks of one token: the baseline. The acceptance length is the mean over responses of each
response's own mean (z-lab's); the pooled one is the mean over all rounds (vLLM's counters). Speed
is z-lab's too: seconds per token behind the prompt, averaged over responses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from dflash.acceptance import AcceptanceStats
from dflash.drafter import Drafter
from dflash.evaluate import first_difference
from dflash.generation import Completion, generate
from dflash.placement import on_device
from dflash.prompts import prompt_tokens
from dflash.target import Target
from dflash.tasks import Sample
from dflash.workers import StopSignal, share

__all__ = ["Figures", "Options", "Worker", "measure"]


@dataclass(frozen=True)
class Options:
    """How the responses are written; the defaults are z-lab's protocol."""

    max_new_tokens: int = 2048
    block_size: int | None = None
    """None: the trained one."""
    temperature: float = 0.0
    seed: int = 0
    thinking: bool = False
    adaptive: bool = False
    compile: bool | str = False
    transformers: bool = True
    """Time `transformers.generate` as well (greedy only)."""
    threads: int = 0
    """CPU threads of an operation; 0 = as they are."""


@dataclass(frozen=True)
class Worker:
    """A device with the target and every drafter on it; the drafters' taps are the targets'."""

    name: str
    pairs: Sequence[tuple[Target, Drafter]]
    """One for each checkpoint."""


@dataclass
class Figures:
    """What one drafter did on one task."""

    acceptance: AcceptanceStats
    responses: list[Completion] = field(default_factory=list)
    baseline: list[Completion] = field(default_factory=list)
    transformers_rates: list[float] = field(default_factory=list)
    """Tokens per second of `transformers.generate`, the prompt's forward included."""

    @property
    def differences(self) -> list[tuple[int, int]]:
        """(response, first token) where drafter and baseline wrote otherwise."""
        return [
            (number, first_difference(ours.ids, plain.ids))
            for number, (ours, plain) in enumerate(zip(self.responses, self.baseline, strict=True))
            if ours.ids != plain.ids
        ]

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; what was not measured is null."""
        differences = self.differences
        tied = sum(_tied(self.responses[n], self.baseline[n], at) for n, at in differences)
        ours, plain = _rate(self.responses), _rate(self.baseline)
        whole = _whole_rate(self.responses)
        theirs = fmean(self.transformers_rates) if self.transformers_rates else math.nan
        rounds = self.acceptance.rounds
        found = self.acceptance.as_dict() | {
            "length_shares": [
                n / rounds if rounds else 0.0 for n in self.acceptance.rounds_of_length
            ],
            "tokens": sum(len(c.ids) for c in self.responses),
            "tokens_per_second": ours,
            "tokens_per_second_plain": plain,
            "speedup": ours / plain,
            "tokens_per_second_with_prompt": whole,
            "tokens_per_second_transformers": theirs,
            "speedup_over_transformers": whole / theirs,
            "first_token_seconds": fmean(c.first_token_seconds for c in self.responses),
            "equal_to_plain": len(self.responses) - len(differences),
            "differences": [list(difference) for difference in differences],
            "differences_at_ties": tied,
            "ties": sum(len(c.ties) for c in self.baseline),
        }
        return {key: _plain(value) for key, value in found.items()}


def measure(
    workers: Sequence[Worker],
    samples: Sequence[Sample],
    options: Options,
    *,
    advance: Callable[[], None] = lambda: None,
    stop: StopSignal | None = None,
) -> list[Figures]:
    """The figures of every checkpoint, in the order of the workers' pairs.

    The workers share the samples; what is written does not depend on who takes it. A later turn of
    a sample follows the baseline's answers, so that all checkpoints see the same prompts.
    """
    found: dict[int, list[_Sample]] = {}

    def work(worker: Worker, number: int) -> None:
        if options.threads:  # each thread has a number of its own
            torch.set_num_threads(options.threads)
        with on_device(worker.pairs[0][0].device):
            found[number] = _decode(worker, samples[number], options)
        advance()

    for worker in workers:  # the first calls of a process are slow: keep them out of the times
        _decode(worker, Sample(samples[0].turns[:1], samples[0].history), _warm_up(options))
    share(
        {worker.name: lambda number, worker=worker: work(worker, number) for worker in workers},  # type: ignore[misc]
        len(samples),
        stop=stop,
    )
    pairs = workers[0].pairs
    figures = [
        Figures(AcceptanceStats(options.block_size or drafter.config.block_size))
        for _, drafter in pairs
    ]
    for number in range(len(samples)):
        for turn in found[number]:
            for figure, completion in zip(figures, turn.drafted, strict=True):
                figure.responses.append(completion)
                figure.baseline.append(turn.plain)
                figure.acceptance.add(completion.accept_lengths)
                if turn.transformers_rate:
                    figure.transformers_rates.append(turn.transformers_rate)
    return figures


@dataclass(frozen=True)
class _Sample:
    """One turn, decoded in every way."""

    plain: Completion
    drafted: Sequence[Completion]
    transformers_rate: float


def _decode(worker: Worker, sample: Sample, options: Options) -> list[_Sample]:
    """All turns of a sample."""
    messages: list[Mapping[str, Any]] = list(sample.history)
    turns = []
    target = worker.pairs[0][0]
    for turn in sample.turns:
        messages.append({"role": "user", "content": turn})
        ids = prompt_tokens(target.tokenizer, messages, 0, thinking=options.thinking)
        plain = _generate(target, None, ids, options)
        drafted = [_generate(tapped, drafter, ids, options) for tapped, drafter in worker.pairs]
        rate = _transformers_rate(target, ids, options)
        turns.append(_Sample(plain, drafted, rate))
        messages.append({"role": "assistant", "content": plain.text or ""})
    return turns


def _generate(
    target: Target, drafter: Drafter | None, ids: list[int], options: Options
) -> Completion:
    return generate(
        target,
        drafter,
        [ids],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        block_size=None if drafter is None else options.block_size,
        adaptive=options.adaptive,
        seed=options.seed,
        compile=options.compile,
    )[0]


def _transformers_rate(target: Target, ids: list[int], options: Options) -> float:
    """Tokens per second of the model's own `generate`; 0 where it is not asked for."""
    if not options.transformers or options.temperature > 0:
        return 0.0
    begun = time.perf_counter()
    written = target.generate(ids, options.max_new_tokens)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return len(written) / (time.perf_counter() - begun)


def _warm_up(options: Options) -> Options:
    changed: dict[str, Any] = {**vars(options), "max_new_tokens": 4}
    return Options(**changed)


def _rate(completions: Sequence[Completion]) -> float:
    """Tokens per second behind the prompt, by the mean of the responses' seconds per token."""
    seconds = [
        (c.seconds - c.first_token_seconds) / (len(c.ids) - 1)
        for c in completions
        if len(c.ids) > 1
    ]
    return 1 / fmean(seconds) if seconds else math.nan


def _whole_rate(completions: Sequence[Completion]) -> float:
    return fmean(len(c.ids) / c.seconds for c in completions)


def _tied(ours: Completion, plain: Completion, at: int) -> bool:
    """Whether the first differing token was a tie for either."""
    return at in ours.ties or at in plain.ties


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value
