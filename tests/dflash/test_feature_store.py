from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest
import torch

from dflash.feature_store import FeatureStore, feature_bytes
from dflash.schedule import Microbatch, feature_groups
from dflash.workers import StopSignal

HIDDEN, TAPS = 3, 2


@dataclass
class Example:
    ids: list[int]
    loss_mask: list[bool]


class Reader:
    """A target whose features say who asked for what: token, position, and the call's shape."""

    def __init__(self, bad_token=None):
        self.device = torch.device("cpu")
        self.calls = []
        self.bad_token = bad_token
        self.lock = threading.Lock()

    def features(self, ids_bS, lengths_b, *, last_hidden):
        with self.lock:
            self.calls.append(tuple(map(tuple, ids_bS.tolist())))
        assert (lengths_b >= 1).all()
        shape_mark = ids_bS.shape[0] * 1000 + ids_bS.shape[1]
        base = torch.stack(
            [
                ids_bS.float(),
                torch.arange(ids_bS.shape[1]).expand_as(ids_bS).float(),
                torch.full(ids_bS.shape, float(shape_mark)),
            ],
            dim=-1,
        )
        outside = torch.arange(ids_bS.shape[1]) >= lengths_b[:, None]
        base = base.masked_fill(outside[..., None], float("nan"))  # padding is garbage
        if self.bad_token is not None:
            base = base.masked_fill((ids_bS == self.bad_token)[..., None], float("inf"))
        return base.repeat(1, 1, TAPS), (-base if last_hidden else None)


def some_examples(count=7, seed=1):
    rng = random.Random(seed)
    examples = []
    for number in range(count):
        length = rng.randint(3, 9)
        examples.append(
            Example([100 * number + i for i in range(length)], [i > 1 for i in range(length)])
        )
    return examples


def make(examples, *, keep, last_hidden=True, group=3):
    groups = feature_groups([len(example.ids) for example in examples], group)
    return FeatureStore(
        examples,
        groups,
        batch=3,
        pad_id=7,
        last_hidden=last_hidden,
        keep=keep,
        pin=False,
        stop=StopSignal(),
    )


def micro(*indices, length=10):
    return Microbatch(number=4, indices=indices, length=length, anchor_seed=99)


@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_holds_its_sequences_and_nothing_else(keep):
    examples = some_examples()
    batch = make(examples, keep=keep).batch(micro(5, 2), Reader())
    assert (batch.number, batch.anchor_seed, batch.dropped) == (4, 99, 0)
    assert batch.context_bSF.shape == (3, 10, HIDDEN * TAPS)
    assert batch.last_bSH.shape == (3, 10, HIDDEN)
    assert batch.lengths_b.tolist() == [len(examples[5].ids), len(examples[2].ids), 0]
    for row, index in enumerate((5, 2)):
        own = len(examples[index].ids)
        assert batch.ids_bS[row].tolist() == examples[index].ids + [7] * (10 - own)
        assert batch.loss_mask_bS[row].tolist() == examples[index].loss_mask + [False] * (10 - own)
        assert batch.context_bSF[row, :own, 0].tolist() == examples[index].ids
        assert batch.context_bSF[row, :own, 1].tolist() == list(range(own))
        assert torch.equal(batch.last_bSH[row, :own], -batch.context_bSF[row, :own, :HIDDEN])
        assert (batch.context_bSF[row, own:] == 0).all()  # the target's padding was nan
        assert (batch.last_bSH[row, own:] == 0).all()
    assert not batch.loss_mask_bS[2].any()
    assert (batch.context_bSF[2] == 0).all()


def test_kept_features_are_of_the_fixed_group_whatever_the_batch():
    examples = some_examples()
    reader = Reader()
    store = make(examples, keep=True)
    alone = store.batch(micro(4), reader).context_bSF[0]
    with_others = store.batch(micro(1, 4, 0, length=12), reader).context_bSF[1]
    own = len(examples[4].ids)
    assert torch.equal(alone[:own], with_others[:own])
    groups = feature_groups([len(example.ids) for example in examples], 3)
    group = next(g for g in groups if 4 in g)
    expected_mark = len(group) * 1000 + max(len(examples[i].ids) for i in group)
    assert (alone[:own, 2] == expected_mark).all()


def test_kept_features_are_computed_once_by_many_workers():
    examples = some_examples(count=12)
    reader = Reader()
    store = make(examples, keep=True)
    start = threading.Barrier(4, timeout=10)

    def work(seed):
        rng = random.Random(seed)
        start.wait()
        for _ in range(20):
            store.batch(micro(*rng.sample(range(12), 3)), reader)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(reader.calls) == len(set(reader.calls)) == 4


def test_without_keeping_a_batch_is_read_as_it_is():
    examples = some_examples()
    reader = Reader()
    store = make(examples, keep=False)
    store.batch(micro(1, 4), reader)
    store.batch(micro(1, 4), reader)
    assert len(reader.calls) == 2
    assert [row[0] for row in reader.calls[0]] == [100, 400, 7]


@pytest.mark.parametrize("keep", [True, False])
def test_a_sequence_with_hidden_states_that_are_not_finite_is_left_out_and_counted(keep):
    examples = some_examples()
    store = make(examples, keep=keep)
    batch = store.batch(micro(2, 5), Reader(bad_token=examples[5].ids[1]))
    assert batch.dropped == 1
    assert batch.loss_mask_bS[0].any()
    assert not batch.loss_mask_bS[1].any()
    for tensor in batch.tensors():
        assert tensor.isfinite().all()


@pytest.mark.parametrize("keep", [True, False])
def test_without_distillation_no_last_hidden_states_travel(keep):
    store = make(some_examples(), keep=keep, last_hidden=False)
    batch = store.batch(micro(2), Reader())
    assert batch.last_bSH is None
    assert len(batch.tensors()) == 4


def test_groups_give_last_hidden_states_by_sequence():
    examples = some_examples()
    store = make(examples, keep=True)
    seen = {}
    for number in range(3):
        seen.update(store.group(number, Reader(bad_token=examples[0].ids[0])))
    assert sorted(seen) == list(range(7))
    assert seen[0] is None  # not finite
    assert seen[3][:, 0].tolist() == [-token for token in examples[3].ids]


def test_sending_within_the_cpu_keeps_the_batch():
    batch = make(some_examples(), keep=True).batch(micro(2), Reader())
    sent = batch.send(torch.device("cpu")).receive()
    assert sent.ready is None
    for mine, other in zip(batch.tensors(), sent.tensors(), strict=True):
        assert torch.equal(mine, other)


def test_feature_bytes():
    sizes = {"feature_size": 6, "hidden_size": 3, "item": 2}
    assert feature_bytes([5, 7], last_hidden=False, **sizes) == 12 * 6 * 2
    assert feature_bytes([5, 7], last_hidden=True, **sizes) == 12 * 9 * 2
