"""The threaded loop on a tiny drafter: same bits whoever works when, and every way to end it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from dflash.config import OptimSettings
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import WorkerFailed
from dflash.feature_store import FeatureStore
from dflash.loop import TrainingLoop
from dflash.replica import Replica
from dflash.schedule import Schedule, choose_buckets, feature_groups
from dflash.step import Frozen, LossTerms
from dflash.workers import StopSignal

VOCAB, HIDDEN = 19, 8
CONFIG = DrafterConfig(
    hidden_size=HIDDEN,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    num_target_layers=6,
    target_layer_ids=(1, 2),
    block_size=3,
    mask_token_id=18,
)
TERMS = LossTerms(
    num_anchors=3, gamma=4.0, ce=1.0, kl=0.5, temperature=1.0, chunk=None, autocast=False
)
OPTIM = OptimSettings(lr=1e-2, weight_decay=0.01)


@dataclass
class Example:
    ids: list[int]
    loss_mask: list[bool]


class Reader:
    """A deterministic target. `hold(call_number)` may delay or fail."""

    device = torch.device("cpu")
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))

    def __init__(self, hold=lambda call: None):
        self.calls = 0
        self.hold = hold

    def features(self, ids_bS, lengths_b, *, last_hidden):
        self.calls += 1
        self.hold(self.calls)
        states = self.weight[ids_bS].cumsum(1)
        return torch.cat([states, states.sin()], dim=-1), states.cos()


def some_examples(count=9):
    rng = random.Random(7)
    lengths = [rng.randint(5, 16) for _ in range(count)]
    return [
        Example([rng.randrange(VOCAB - 1) for _ in range(n)], [i > 0 for i in range(n)])
        for n in lengths
    ]


class Run:
    """Everything of a run; `records` holds (lr, result) of each step."""

    def __init__(
        self,
        *,
        targets=1,
        drafters=2,
        steps=6,
        keep=True,
        state=None,
        hold=None,
        on_step=None,
        accumulate=2,
        terms=TERMS,
    ):
        examples = some_examples()
        lengths = [len(example.ids) for example in examples]
        self.stop = StopSignal()
        self.schedule = Schedule(
            lengths,
            buckets=choose_buckets(lengths, multiple=4, count=2),
            seed=1,
            batch=2,
            drafters=drafters,
            accumulate=accumulate,
            epochs=1.0,
            steps=steps,
        )
        store = FeatureStore(
            examples,
            feature_groups(lengths, 3),
            batch=2,
            pad_id=0,
            last_hidden=True,
            keep=keep,
            pin=False,
            stop=self.stop,
        )
        frozen = Frozen(Reader.weight, Reader.weight)
        self.replicas = []
        for _ in range(drafters):
            drafter = Drafter(CONFIG)
            drafter.reset_parameters(torch.Generator().manual_seed(11))
            self.replicas.append(Replica(drafter, frozen, terms, OPTIM))
            if state is not None:
                self.replicas[-1].load(state[0], completed=state[1])
        self.records = []
        self.on_step = on_step or (lambda run: None)
        self.readers = [Reader(hold or (lambda call: None)) for _ in range(targets)]
        self.loop = TrainingLoop(
            schedule=self.schedule,
            store=store,
            targets=self.readers,
            replicas=self.replicas,
            optim=OPTIM,
            batch=2,
            queue=1,
            stop=self.stop,
            on_step=self._record,
        )

    def _record(self, lr, result, waits):
        self.records.append((lr, result))
        self.on_step(self)

    def go(self):
        self.loop.run()
        return self

    @property
    def losses(self):
        return [(result.loss, result.ce, result.kl, result.grad_norm) for _, result in self.records]

    @property
    def weights(self):
        return self.replicas[0].flat.values_P

    def state(self):
        tensors = {name: t.clone() for name, t in self.replicas[0].tensors().items()}
        return tensors, self.replicas[0].completed


def test_training_lowers_the_loss_and_keeps_all_replicas_equal():
    run = Run(drafters=3, steps=25).go()
    assert len(run.records) == 25
    assert run.losses[-1][0] < run.losses[0][0] - 0.3
    for replica in run.replicas[1:]:
        assert torch.equal(replica.flat.values_P, run.weights)
        assert replica.completed == 25


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("targets", [2, 4])
def test_same_bits_with_one_target_worker_or_several(targets, keep):
    rng = random.Random(targets)
    jitter = lambda call: time.sleep(rng.choice([0.0, 0.0, 0.004]))  # noqa: E731
    one = Run(targets=1, keep=keep).go()
    many = Run(targets=targets, keep=keep, hold=jitter).go()
    assert one.losses == many.losses
    assert torch.equal(one.weights, many.weights)
    assert len({loss for loss, *_ in one.losses}) == 6
    if not keep:
        assert sum(reader.calls > 0 for reader in many.readers) > 1


def test_kept_and_recomputed_features_train_alike():
    kept, anew = Run(keep=True).go(), Run(keep=False).go()
    for mine, other in zip(kept.losses, anew.losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


def test_an_interrupted_run_goes_on_with_the_same_bits():
    whole = Run(steps=8).go()

    def interrupt(run):
        if len(run.records) == 3:
            run.stop.set()

    part = Run(steps=8, on_step=interrupt).go()
    state = part.state()
    assert 3 <= state[1] < 8
    rest = Run(steps=8, state=state, targets=2).go()
    assert part.losses[: state[1]] + rest.losses == whole.losses
    assert [lr for lr, _ in rest.records] == [lr for lr, _ in whole.records[state[1] :]]
    assert torch.equal(rest.weights, whole.weights)


def test_a_step_is_the_mean_over_all_supervised_slots_not_a_mean_of_means():
    """Two drafters with one batch each equal one drafter that accumulates the two batches."""
    two = Run(drafters=2, accumulate=1, steps=4)
    one = Run(drafters=1, accumulate=2, steps=4)
    # One drafter's rounds are other batches: give it the two drafters' batches in the same order.
    one.schedule.microbatch = two.schedule.microbatch
    two.go(), one.go()
    for mine, other in zip(two.losses, one.losses, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_a_failing_target_ends_the_run_at_once_with_its_traceback_first(capsys):
    def hold(call):
        if call == 3:
            raise MemoryError("no room for hidden states")

    started = time.monotonic()
    run = Run(hold=hold, keep=False, targets=2)
    with pytest.raises(WorkerFailed, match="no room for hidden states") as caught:
        run.go()
    assert time.monotonic() - started < 5
    assert caught.value.thread_name.startswith("target-")
    assert capsys.readouterr().err.lstrip().startswith("thread target-")


def test_a_failing_drafter_ends_the_run_while_others_wait_for_it(capsys):
    run = Run(drafters=3)
    threads = threading.active_count()
    real = run.replicas[2].run

    def fail(batch):
        if batch.number > 0:
            raise ArithmeticError("bad batch")
        real(batch)

    run.replicas[2].run = fail
    with pytest.raises(WorkerFailed, match="'drafter-2' failed: ArithmeticError: bad batch"):
        run.go()
    assert threading.active_count() == threads
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_failure_while_a_drafter_compiles_ends_the_run():
    run = Run(drafters=2)
    run.replicas[0].warm_up = lambda lengths, batch: 1 / 0
    with pytest.raises(WorkerFailed, match="'drafter-0' failed: ZeroDivisionError"):
        run.go()
    assert run.records == []
    assert all(reader.calls == 0 for reader in run.readers)


def test_a_loss_that_is_not_finite_stops_before_anything_is_reported(capsys):
    run = Run(drafters=2)

    def poison(current):
        with torch.no_grad():
            current.weights[0] = float("nan")

    run.on_step = poison
    with pytest.raises(WorkerFailed, match=r"step 2: the loss is nan .* lower optim\.lr"):
        run.go()
    assert len(run.records) == 1


def test_targets_begin_when_all_drafters_have_compiled():
    run = Run(drafters=2)
    order = []
    for rank, replica in enumerate(run.replicas):
        real = replica.warm_up

        def warm_up(lengths, batch, rank=rank, real=real):
            assert all(reader.calls == 0 for reader in run.readers)
            order.append(("enter", rank))
            real(lengths, batch)
            order.append(("leave", rank))

        replica.warm_up = warm_up
    run.go()
    assert order == [("enter", 0), ("leave", 0), ("enter", 1), ("leave", 1)]


def test_warming_up_leaves_no_trace():
    run = Run()
    before = {name: t.clone() for name, t in run.replicas[0].tensors().items()}
    run.replicas[0].warm_up([8, 16], 2)
    assert (run.replicas[0].flat.grads_P == 0).all()
    assert (run.replicas[0].sums_K == 0).all()
    for name, tensor in run.replicas[0].tensors().items():
        assert torch.equal(tensor, before[name])


def test_waits_are_counted_on_the_side_that_waits():
    slow_targets = Run(hold=lambda call: time.sleep(0.03), keep=False).go().loop.waits
    assert slow_targets.drafters > 0.1
    assert slow_targets.drafters > slow_targets.targets
    slow_drafters = Run(on_step=lambda run: time.sleep(0.03)).go().loop.waits
    assert slow_drafters.targets > 0.05
    assert slow_drafters.exchange > 0


def test_an_empty_last_batch_of_an_epoch_is_no_obstacle():
    run = Run(drafters=3, accumulate=1, steps=8)
    sizes = [len(run.schedule.microbatch(number).indices) for number in range(run.schedule.total)]
    assert 1 in sizes or 0 in sizes
    run.go()
    assert len(run.records) == 8
