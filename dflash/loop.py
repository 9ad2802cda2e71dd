"""The training loop: what the target threads and the drafter threads do.

    target-i    takes the next batch of the schedule, reads its sequences, hands hidden states over
    drafter-r   compiles, then per step: batches in order, exchange, update; drafter-0 reports

A batch's number says which drafter gets it and when, so the order never depends on the threads.
Target threads begin when every drafter has compiled: while torch traces, `is_compiling()` can be
true in other threads too, and a model that asks would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dflash.config import OptimSettings
from dflash.exchange import GradientExchange
from dflash.feature_store import Batch, FeatureSource, FeatureStore
from dflash.placement import on_device
from dflash.replica import Replica, StepResult
from dflash.schedule import Schedule, learning_rate
from dflash.workers import OrderedChannel, StopSignal, Tickets, Turnstile, WorkerGroup


@dataclass(frozen=True)
class Waits:
    """Seconds spent waiting since the loop began, summed over the threads of a side."""

    targets: float
    """For room in the queues: the drafters are the bottleneck."""
    drafters: float
    """For features: the targets are the bottleneck."""
    exchange: float
    """For other drafters at the end of a step."""


class TrainingLoop:
    """Trains `replicas` from where they are to the end of the schedule.

    `on_step(lr, result, waits)` is called by drafter-0 after each of its updates, before the next
    step begins there; it may write a checkpoint of replica 0.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        store: FeatureStore,
        targets: Sequence[FeatureSource],
        replicas: Sequence[Replica],
        optim: OptimSettings,
        batch: int,
        queue: int,
        stop: StopSignal,
        on_step: Callable[[float, StepResult, Waits], None],
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._schedule = schedule
        self._store = store
        self._targets = targets
        self._replicas = replicas
        self._optim = optim
        self._batch = batch
        self._stop = stop
        self._on_step = on_step
        self._on_compiled = on_compiled
        self._first = replicas[0].completed
        drafters = len(replicas)
        self._tickets = Tickets(self._first * schedule.per_step, schedule.total)
        self._channels: list[OrderedChannel[Batch | None]] = [
            OrderedChannel(queue, stop) for _ in range(drafters)
        ]
        self._exchange = GradientExchange(drafters, stop)
        self._compiled = Turnstile(drafters, stop)
        self._group = WorkerGroup(stop=stop)

    @property
    def stuck(self) -> tuple[str, ...]:
        """Threads that did not end when they were told to."""
        return self._group.stuck

    def run(self) -> None:
        """Start all threads and wait for them. WorkerFailed if one fails."""
        with self._group as group:
            for number, target in enumerate(self._targets):
                group.start(f"target-{number}", partial(self._target, target))
            for rank in range(len(self._replicas)):
                group.start(f"drafter-{rank}", partial(self._drafter, rank))
            group.wait()

    @property
    def waits(self) -> Waits:
        return Waits(
            targets=sum(channel.put_wait for channel in self._channels),
            drafters=sum(channel.get_wait for channel in self._channels),
            exchange=sum(self._exchange.waited),
        )

    def _target(self, target: FeatureSource) -> None:
        drafters = len(self._replicas)
        before = self._first * self._schedule.accumulate
        with on_device(target.device):
            self._compiled.wait_all()
            while (number := self._tickets.take()) is not None:
                round_number, rank = divmod(number, drafters)
                micro = self._schedule.microbatch(number)
                batch = None  # nothing for this drafter in an epoch's last, short round
                if micro.indices:
                    batch = self._store.batch(micro, target).send(self._replicas[rank].device)
                self._channels[rank].put(round_number - before, batch)
                self._stop.check()

    def _drafter(self, rank: int) -> None:
        replica = self._replicas[rank]
        with on_device(replica.device):
            self._compiled.run(rank, lambda: replica.warm_up(self._schedule.buckets, self._batch))
            self._compiled.wait_all()
            if rank == 0:
                self._on_compiled()
            for step in range(self._first, self._schedule.steps):
                replica.begin()
                for _ in range(self._schedule.accumulate):
                    batch = self._channels[rank].get()
                    if batch is not None:
                        replica.run(batch.receive())
                self._exchange.reduce(rank, replica.flat.grads_P, replica.sums_K)
                rate = self._rate(step)
                norm = replica.update(rate)
                if rank == 0:
                    self._on_step(rate, replica.result(norm), self.waits)

    def _rate(self, step: int) -> float:
        optim = self._optim
        return learning_rate(
            step,
            self._schedule.steps,
            peak=optim.lr,
            warmup=optim.warmup,
            schedule=optim.schedule,
            minimum=optim.min_lr,
        )
