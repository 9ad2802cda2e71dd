from __future__ import annotations

import pytest
import torch
from model_dir import make_model, make_tokenizer

from dflash import responses as responses_module
from dflash.chat import encode_prompt
from dflash.config import DataSettings
from dflash.data import Conversation
from dflash.decode import greedy
from dflash.errors import DataError, WorkerFailed
from dflash.responses import training_examples
from dflash.target import Target
from dflash.workers import StopSignal


@pytest.fixture(scope="module")
def target():
    return Target("tiny", make_model(seed=3), make_tokenizer())


def talk(origin, *texts):
    roles = ["user", "assistant"]
    return Conversation(
        tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)), origin
    )


MIXED = [
    talk("a", "w1 w2"),
    talk("b", "w3", "w4 w5"),
    talk("c", "w6 w7 w8", "w9", "w10"),
    talk("d", "w11", "w12 w13", "w14", "w15 w16"),
]


def run(target, tmp_path, conversations=MIXED, targets=1, **settings):
    said = []
    options = {"max_new_tokens": 8, "response_batch": 2, "max_length": 100} | settings
    found = training_examples(
        conversations,
        [target] * targets,
        DataSettings(**options),
        tmp_path / "responses.jsonl",
        StopSignal(),
        said.append,
    )
    return found, said


def alone(target, messages, limit=8):
    """What the target answers, decoded on its own."""
    ids = encode_prompt(target.tokenizer, messages, "x")
    return greedy(target, ids, limit, target.spec.eos_ids).ids


def test_only_missing_answers_are_written(target, tmp_path):
    found, _ = run(target, tmp_path, responses="missing")
    assert [example.origin for example in found] == ["a", "b", "c", "d"]
    for index in (0, 2):
        messages = MIXED[index].messages
        prompt = encode_prompt(target.tokenizer, messages, "x")
        assert list(found[index].ids) == [*prompt, *alone(target, messages)]
    assert target.tokenizer.decode(found[1].ids).endswith("w4 w5 <end>")
    assert len((tmp_path / "responses.jsonl").read_text().splitlines()) == 2


def test_always_writes_every_turn_after_the_history_as_written(target, tmp_path):
    found, _ = run(target, tmp_path, responses="always")
    user = MIXED[3].messages
    first = alone(target, user[:1])
    answer = {
        "role": "assistant",
        "content": target.tokenizer.decode(first, skip_special_tokens=True),
    }
    history = [user[0], answer, user[2]]
    prompt = encode_prompt(target.tokenizer, history, "x")
    assert list(found[3].ids) == [*prompt, *alone(target, history)]
    # a, b: one turn each; c, d: two
    assert len((tmp_path / "responses.jsonl").read_text().splitlines()) == 6


def test_never_refuses_a_missing_answer(target, tmp_path):
    with pytest.raises(DataError, match=r"a: it has no response, and data\.responses is never"):
        run(target, tmp_path, responses="never")
    found, said = run(target, tmp_path, responses="never", on_bad="skip")
    assert [example.origin for example in found] == ["b", "d"]
    assert "left out 2 conversations" in said[0]
    assert not (tmp_path / "responses.jsonl").exists()


def test_two_workers_write_the_same(target, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, _ = run(target, tmp_path / "one", responses="always")
    two, _ = run(target, tmp_path / "two", responses="always", targets=2)
    assert one == two


def test_what_was_written_is_not_written_again_and_a_cut_run_goes_on(target, tmp_path, monkeypatch):
    whole, _ = run(target, tmp_path, responses="always")
    path = tmp_path / "responses.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    batches = []
    real = responses_module.respond_batch

    def count(target, prompts, *rest):
        batches.append(len(prompts))
        return real(target, prompts, *rest)

    monkeypatch.setattr(responses_module, "respond_batch", count)
    assert run(target, tmp_path, responses="always")[0] == whole
    assert batches == []
    path.write_text("".join(lines[:3]) + lines[3][: len(lines[3]) // 2])  # killed while writing
    assert run(target, tmp_path, responses="always")[0] == whole
    assert sum(batches) == 4  # one batch of the first turn, of which one answer was there, and c, d
    kept = {line for line in path.read_text().splitlines()}
    assert {line.strip() for line in lines} <= kept


def test_another_limit_is_another_answer(target, tmp_path):
    short, _ = run(target, tmp_path, max_new_tokens=3)
    longer, _ = run(target, tmp_path, max_new_tokens=8)
    assert len(longer[0].ids) > len(short[0].ids)


def test_a_prompt_that_leaves_no_room(target, tmp_path):
    with pytest.raises(DataError, match=r"c: its prompt has \d+ tokens.*data\.max_length=12"):
        run(target, tmp_path, responses="missing", max_length=12)
    found, said = run(target, tmp_path, responses="missing", max_length=12, on_bad="skip")
    assert "c: its prompt" in said[0]
    assert all(len(example.ids) <= 12 for example in found)


def test_an_answer_too_short_to_draft_in(target, tmp_path):
    short = [talk("s", "w1", ""), talk("t", "w1", "w2 w3")]
    with pytest.raises(DataError, match="s: too short for a block"):
        run(target, tmp_path, short, responses="missing")
    found, said = run(target, tmp_path, short, responses="missing", on_bad="skip")
    assert [example.origin for example in found] == ["t"]
    # The user has no part in what the target says: its own short answers are no error.
    found, said = run(target, tmp_path, [talk("u", "w1"), short[1]], max_new_tokens=1)
    assert [example.origin for example in found] == ["t"]
    assert "1 answers of the target are too short" in said[0]
    with pytest.raises(DataError, match="no conversation is left"):
        run(target, tmp_path, [talk("u", "w1")], max_new_tokens=1)


def test_a_failing_writer_is_named(target, tmp_path, monkeypatch):
    def fail(*_):
        raise ArithmeticError("broken")

    monkeypatch.setattr(responses_module, "respond_batch", fail)
    with pytest.raises(WorkerFailed, match="thread 'target-0' failed: ArithmeticError: broken"):
        run(target, tmp_path)


def test_the_process_random_state_is_left_alone(target, tmp_path):
    before = torch.random.get_rng_state()
    run(target, tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
