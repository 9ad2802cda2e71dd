"""`dflash train` from end to end.

    conversations -> answers -> tokens and loss mask -> features -> threaded training -> decoding

Each stage is a module of its own; this one says in which order they run, what a run keeps, and how
it ends. Whatever can be wrong with the input is found before the run directory is made.
"""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import torchcompat
from dflash import __version__
from dflash.assemble import (
    drafter_shape,
    fill_features,
    frozen_weights,
    head_rows,
    make_replicas,
    mask_token,
    starts_from_checkpoint,
)
from dflash.chat import Example, encode_prompt, encode_text_prompt
from dflash.config import Config
from dflash.data import Conversation, Rejects, Split, read_data, split
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import DataError
from dflash.evaluate import Evaluation, decoding_threads, evaluate
from dflash.feature_store import FeatureStore, feature_bytes
from dflash.humaneval import humaneval
from dflash.journal import Journal
from dflash.loop import TrainingLoop
from dflash.placement import (
    Placement,
    compile_backend,
    cores,
    cpu_threads,
    place,
    target_dtype,
)
from dflash.progress import PhaseTimer, ProgressBar, say, table
from dflash.replica import Replica
from dflash.resolve import with_settings
from dflash.responses import training_examples
from dflash.run_dir import RunDir, read_json, write_json
from dflash.schedule import Schedule, choose_buckets, feature_groups
from dflash.state import load_checkpoint, save_checkpoint
from dflash.target import Target, load_target
from dflash.workers import StopSignal

__all__ = ["train"]


def train(config: Config, *, run_path: Path | None, resume_path: Path | None) -> int:
    """Run, or go on with, a training; 0 when all of it is done.

    Raises DFlashError for whatever ends a run early (WorkerFailed: the thread's traceback is on
    stderr by then) and KeyboardInterrupt after an interrupt; a checkpoint is written before.
    """
    report = torchcompat.apply()
    timer = PhaseTimer()
    with timer.phase("model and data"):
        rejects = Rejects(config.data.on_bad)
        conversations = read_conversations(config, rejects)
        if bad := rejects.problems:
            say(f"skipped {len(bad)} of {len(bad) + len(conversations)} rows; the first: {bad[0]}")
        placement = place(
            config.placement.targets, config.placement.drafters, gpus=torch.cuda.device_count()
        )
        config = _settled(config, placement)
        parts = split(conversations, config.data.held_out, config.train.seed)
        target = load_target(config.target.name, config.target.dtype, placement.targets[0], say=say)
        prompts = held_out_prompts(config, target, parts)
        # What cannot be trained (a drafter of another target, too many taps) is said now.
        drafter_shape(config, target, max(0, config.drafter.mask_token_id))
        run = _open_run(config, run_path, resume_path, target)
        _note_session(run, report)
    _say_start(config, placement, target, parts, run, report)
    trainer = Trainer(config, placement, target, parts, run, timer)
    replica = trainer.train()
    _finish(config, trainer, replica, prompts, timer)
    return 0


def read_conversations(config: Config, rejects: Rejects) -> list[Conversation]:
    """All conversations of the configured source, bad rows to `rejects`. Raises DataError."""
    data = config.data
    if data.source == "humaneval":
        found = humaneval()
        return found[: data.limit] if data.limit else found
    return read_data(data, config.train.seed, rejects)


def held_out_prompts(config: Config, target: Target, parts: Split) -> list[list[int]]:
    """The prompts to decode at the end, as tokens. Raises DataError for one that is too long."""
    count = config.eval.prompts or len(parts.held_out)
    prompts = []
    for conversation in parts.held_out[:count]:
        ids = _prompt_ids(config, target, conversation)
        if ids is None:
            say(f"{conversation.origin}: held out, but a text without data.marker has no prompt")
            continue
        room = target.spec.max_position_embeddings - config.eval.max_new_tokens
        if len(ids) <= room:
            prompts.append(ids)
        elif config.data.on_bad == "error":
            raise DataError(
                f"{conversation.origin}: its prompt has {len(ids)} tokens; with "
                f"eval.max_new_tokens={config.eval.max_new_tokens} that is more than the "
                f"{target.spec.max_position_embeddings} the target reads; lower it, or "
                "data.on_bad=skip"
            )
    return prompts


def _prompt_ids(config: Config, target: Target, conversation: Conversation) -> list[int] | None:
    if conversation.text is not None:
        return encode_text_prompt(target.tokenizer, conversation.text, config.data.marker)
    return encode_prompt(
        target.tokenizer, conversation.prompt, conversation.origin, conversation.tools
    )


@dataclass
class Trainer:
    """The stages between the input and the trained drafter, of one run."""

    config: Config
    placement: Placement
    target: Target
    parts: Split
    run: RunDir
    timer: PhaseTimer

    def train(self) -> Replica:
        """All stages; the trained copy. KeyboardInterrupt after a checkpoint is written."""
        stop = StopSignal()
        torch.set_num_threads(cores())  # until training begins the target has them all
        plain = [self.target.on(device) for device in self.placement.targets]
        with self.timer.phase("responses"):
            examples = training_examples(
                self.parts.train, plain, self.config.data, self.run.responses, stop, say
            )
        shape = self._shape(examples)
        targets = [target.with_taps(shape.target_layer_ids) for target in plain]
        schedule = self._schedule(examples)
        store, groups = self._store(examples, shape, stop)
        with self.timer.phase("features"):
            rows_R = self._read_features(store, groups, targets, examples, stop)
        with self.timer.phase("drafters"):
            replicas = self._replicas(shape, targets[0], examples, rows_R, schedule)
        torch.set_num_threads(self.config.placement.threads)
        self._loop(schedule, store, targets, replicas, stop)
        return replicas[0]

    def _shape(self, examples: Sequence[Example]) -> DrafterConfig:
        mask_id = 0  # that of the checkpoint, if one is the start
        if not starts_from_checkpoint(self.config.drafter.init):
            used = {token for example in examples for token in example.ids}
            token = mask_token(self.config, self.target, used)
            say(f"mask token {token.id}: {token.reason}")
            mask_id = token.id
        shape = drafter_shape(self.config, self.target, mask_id)
        say(
            f"drafter: {shape.num_hidden_layers} layers, blocks of {shape.block_size}, reads the "
            f"target's layers {', '.join(map(str, shape.target_layer_ids))}"
        )
        return shape

    def _schedule(self, examples: Sequence[Example]) -> Schedule:
        config, lengths = self.config, [len(example.ids) for example in examples]
        schedule = Schedule(
            lengths,
            buckets=choose_buckets(
                lengths, multiple=config.features.multiple, count=config.features.buckets
            ),
            seed=config.train.seed,
            batch=config.train.batch,
            drafters=len(self.placement.drafters),
            accumulate=config.train.accumulate,
            epochs=config.train.epochs,
            steps=config.train.steps,
        )
        rounds = schedule.steps * config.train.accumulate
        say(
            f"{len(examples)} sequences, {sum(lengths)} tokens, padded to "
            f"{', '.join(map(str, schedule.buckets))}; {schedule.steps} steps, "
            f"{rounds / schedule.rounds_per_epoch:.1f} visits of each"
        )
        return schedule

    def _store(
        self, examples: Sequence[Example], shape: DrafterConfig, stop: StopSignal
    ) -> tuple[FeatureStore, tuple[tuple[int, ...], ...]]:
        config, lengths = self.config, [len(example.ids) for example in examples]
        last_hidden = config.loss.kl > 0 or _top(config) > 0
        size = feature_bytes(
            lengths,
            feature_size=shape.feature_size,
            hidden_size=shape.hidden_size,
            item=self.target.embed_weight.element_size(),
            last_hidden=last_hidden,
        )
        fits = size <= config.features.cache_gb * 1e9
        keep = config.features.cache == "memory" or (config.features.cache == "auto" and fits)
        say(
            f"features: {size / 1e9:.2f} GB in all, "
            + ("kept in memory" if keep else "computed anew for every batch")
        )
        groups = feature_groups(lengths, config.features.batch)
        store = FeatureStore(
            examples,
            groups,
            batch=config.train.batch,
            pad_id=self.target.spec.pad_id,
            last_hidden=last_hidden,
            keep=keep,
            pin=any(device.type == "cuda" for device in self.placement.drafters),
            stop=stop,
        )
        return store, groups

    def _read_features(
        self,
        store: FeatureStore,
        groups: Sequence[Sequence[int]],
        targets: Sequence[Target],
        examples: Sequence[Example],
        stop: StopSignal,
    ) -> torch.Tensor | None:
        """The head rows of the loss; a store that keeps features is full afterwards."""
        config = self.config
        if not store.keeps and not _top(config):
            best: set[int] = set()
        else:
            best = fill_features(store, len(groups), targets, examples, top=_top(config), stop=stop)
        if config.loss.head_vocab == "full":
            return None
        rows_R = head_rows(examples, self.target, best)
        say(f"loss over {len(rows_R)} of {self.target.spec.vocab_size} tokens")
        return rows_R

    def _replicas(
        self,
        shape: DrafterConfig,
        target: Target,
        examples: Sequence[Example],
        rows_R: torch.Tensor | None,
        schedule: Schedule,
    ) -> list[Replica]:
        config, devices = self.config, self.placement.drafters
        dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
        frozen = frozen_weights(target, devices, dtype, rows_R)
        replicas = make_replicas(config, shape, target, devices, frozen, examples[0].ids)
        newest = self.run.latest()
        if newest is not None:
            for replica in replicas:
                load_checkpoint(newest[1], replica, schedule=schedule.fingerprint)
            say(f"goes on after step {newest[0]}")
        return replicas

    def _loop(
        self,
        schedule: Schedule,
        store: FeatureStore,
        targets: Sequence[Target],
        replicas: Sequence[Replica],
        stop: StopSignal,
    ) -> None:
        config = self.config

        def checkpoint() -> None:
            with self.timer.phase("checkpoints"):
                save_checkpoint(
                    self.run, replicas[0], schedule=schedule.fingerprint, keep=config.train.keep
                )

        journal = Journal(
            self.run,
            steps=schedule.steps,
            first=replicas[0].completed,
            log_every=config.train.log_every,
            checkpoint_every=config.train.checkpoint_every,
            checkpoint=checkpoint,
        )
        started = time.perf_counter()
        compiled = started

        def on_compiled() -> None:
            nonlocal compiled
            compiled = time.perf_counter()
            say(f"compiled in {compiled - started:.0f} s ({config.train.backend})")
            journal.begin()

        loop = TrainingLoop(
            schedule=schedule,
            store=store,
            targets=targets,
            replicas=replicas,
            optim=config.optim,
            batch=config.train.batch,
            queue=config.features.queue,
            stop=stop,
            on_step=journal.on_step,
            on_compiled=on_compiled,
        )
        if replicas[0].completed == schedule.steps:
            return
        try:
            loop.run()
        except KeyboardInterrupt:
            self._save_interrupted(loop, checkpoint, replicas[0])
            raise
        self.timer.add("compile", compiled - started)
        written = self.timer.seconds.get("checkpoints", 0.0)
        self.timer.add("training", time.perf_counter() - compiled - written)

    def _save_interrupted(
        self, loop: TrainingLoop, checkpoint: Callable[[], None], replica: Replica
    ) -> None:
        if loop.stuck:
            say(f"no checkpoint: {', '.join(loop.stuck)} did not stop, so its state is in between")
        elif replica.completed:
            checkpoint()
            say(f"checkpoint of step {replica.completed} written")
        say(f"go on with: python -m dflash train --resume {self.run.path}")


def _finish(
    config: Config,
    trainer: Trainer,
    replica: Replica,
    prompts: Sequence[Sequence[int]],
    timer: PhaseTimer,
) -> None:
    run = trainer.run
    found: Evaluation | None = None
    if prompts:
        with timer.phase("evaluation"):
            found = _evaluate(config, trainer, replica.drafter, prompts)
        say("")
        say(table(f"{len(prompts)} held-out prompts", found.rows(config.eval.dtype)))
    else:
        say("no prompt is held out (data.held_out): nothing to decode")
    say("")
    say(table("time", timer.rows()))
    content = {} if found is None else found.to_dict()
    write_json(run.evaluation, content | {"step": replica.completed, "seconds": timer.seconds})
    newest = run.latest()
    say("")
    say(f"drafter: {newest[1] if newest else run.path}")


def _evaluate(
    config: Config, trainer: Trainer, trained: Drafter, prompts: Sequence[Sequence[int]]
) -> Evaluation:
    dtype = getattr(torch, config.eval.dtype)
    target = trainer.target
    if target.dtype != dtype:
        target = load_target(config.target.name, dtype, target.device, say=say)
    target = target.with_taps(trained.config.target_layer_ids)
    torch.set_num_threads(config.eval.threads or decoding_threads(target, prompts[0]))
    drafter = Drafter(trained.config)  # uncompiled, and no view of the training's weights
    drafter.load_state_dict(trained.state_dict())
    drafter.to(target.device, dtype).requires_grad_(False)
    with ProgressBar("decoding", len(prompts), "prompts") as bar:
        return evaluate(
            target,
            drafter,
            prompts,
            max_new_tokens=config.eval.max_new_tokens,
            stop_ids=target.spec.eos_ids,
            advance=bar.advance,
        )


def _top(config: Config) -> int:
    return config.loss.head_top if config.loss.head_vocab == "seen" else 0


def _settled(config: Config, placement: Placement) -> Config:
    """The choices that `auto` leaves to the machine, made: a resumed run keeps them."""
    dtype = target_dtype(config.target.dtype, placement.targets[0])
    backend = compile_backend(config.train.backend, placement.drafters[0])
    threads = cpu_threads(config.placement.threads, len(placement.drafters))
    say(f"target in {dtype.value} ({dtype.reason}); compiler: {backend.value} ({backend.reason})")
    return with_settings(
        config,
        {
            "target.dtype": dtype.value,
            "train.backend": backend.value,
            "placement.drafters": ",".join(str(device) for device in placement.drafters),
            "placement.threads": threads,
        },
    )


def _open_run(
    config: Config, run_path: Path | None, resume_path: Path | None, target: Target
) -> RunDir:
    if resume_path is not None:
        return RunDir.open(resume_path)
    run = RunDir.create(run_path, name=Path(target.spec.name).name or "target")
    write_json(run.config, config.to_dict())
    return run


def _note_session(run: RunDir, report: torchcompat.Report) -> None:
    """Add how and with what this process was started; a resumed run has several."""
    sessions = read_json(run.environment) if run.environment.exists() else []
    session = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": sys.argv,
        "dflash": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {cores()} cores, {torch.cuda.device_count()} GPUs",
        "torchcompat": report.to_dict(),
    }
    write_json(run.environment, [*sessions, session])


def _say_start(
    config: Config,
    placement: Placement,
    target: Target,
    parts: Split,
    run: RunDir,
    report: torchcompat.Report,
) -> None:
    say(f"run: {run.path}")
    say(f"{placement} ({placement.reason})")
    say(
        f"target: {target.spec.name}, {target.spec.num_layers} layers of "
        f"{target.spec.hidden_size}; {len(parts.train)} conversations to train on, "
        f"{len(parts.held_out)} held out"
    )
    counts = Counter(verdict.state.value for verdict in report)
    say(f"torchcompat: {', '.join(f'{n} {state}' for state, n in counts.items())}")
    for verdict in report.findings:
        say(f"torchcompat: {verdict.patch_id} {verdict.state.value}: {verdict.reason}")
