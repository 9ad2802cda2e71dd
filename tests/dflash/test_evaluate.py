from __future__ import annotations

import pytest
import torch

from dflash import evaluate as evaluate_module
from dflash.acceptance import AcceptanceStats
from dflash.decode import Generation
from dflash.evaluate import Evaluation, evaluate, first_difference

PROMPTS = [[5, 9, 3], [1], [7, 7, 8, 30]]


def test_outputs_are_the_targets_own_and_each_prompt_counts(fake_target, make_drafter):
    ticks = []
    found = evaluate(
        fake_target,
        make_drafter(),
        PROMPTS,
        max_new_tokens=12,
        stop_ids=(2,),
        advance=lambda: ticks.append(1),
    )
    assert (found.prompts, found.equal, found.differences) == (3, 3, [])
    assert found.tokens == found.drafted_tokens > 3
    assert found.acceptance.responses == 3
    assert len(ticks) == 3
    assert found.greedy_rate > 0
    assert found.drafted_rate > 0


def test_a_different_output_is_counted_and_located(monkeypatch, fake_target, make_drafter):
    outputs = iter([[1, 2, 3], [1, 2, 3], [4, 5], [4, 5, 6], [7, 8, 9], [7, 0, 9]])

    def generation(*args):
        return Generation(ids=next(outputs), seconds=0.5, calls=3, accept_lengths=[1, 2])

    def decode(target, *args):
        return Generation([1], 0.5, 1) if 4 in args else generation()

    monkeypatch.setattr(evaluate_module, "greedy", decode)
    monkeypatch.setattr(evaluate_module, "speculative", decode)
    found = evaluate(fake_target, make_drafter(), PROMPTS, max_new_tokens=99, stop_ids=())
    assert found.equal == 1
    assert found.differences == [(1, 2), (2, 1)]
    assert found.greedy_rate == pytest.approx(8 / 1.5)
    assert found.drafted_rate == pytest.approx(9 / 1.5)
    assert found.to_dict()["outputs_equal_to_greedy"] == 1


def test_rows_say_every_figure():
    stats = AcceptanceStats(3)
    stats.add([1, 3, 2])
    stats.add([1])
    found = Evaluation(
        stats, prompts=2, tokens=40, drafted_tokens=40, greedy_seconds=4.0, drafted_seconds=2.0
    )
    rows = dict(found.rows("float32"))
    assert rows["acceptance length"].startswith("1.500 mean of responses, 1.750 pooled")
    assert rows["accepted by slot"] == "1: 50 %  2: 25 %"
    assert rows["tokens per second"] == "10.0 target alone, 20.0 with the drafter (2.00x)"
    assert rows["equal to greedy"] == "2 of 2 outputs (40 tokens, float32)"


def test_threads_are_chosen_by_measuring_and_left_to_the_caller(monkeypatch, fake_target):
    monkeypatch.setattr(evaluate_module, "cores", lambda: 8)
    used, chosen = [], []
    monkeypatch.setattr(evaluate_module.torch, "set_num_threads", used.append)
    for slow in (1, 8):

        def decode(*_, slow=slow):
            return Generation([1], 2.0 if used[-1] == slow else 1.0, 1, prefill_seconds=0.5)

        monkeypatch.setattr(evaluate_module, "greedy", decode)
        chosen.append(evaluate_module.decoding_threads(fake_target, [1]))
    assert chosen == [8, 1]


def test_first_difference():
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_no_prompts(fake_target, make_drafter):
    found = evaluate(fake_target, make_drafter(), [], max_new_tokens=3, stop_ids=())
    assert found.prompts == 0
    assert torch.tensor(found.acceptance.macro).isnan()
