"""The protocol's figures, and the two commands on a tiny model."""

from __future__ import annotations

import json
import threading

import pytest
from model_dir import make_model, make_tokenizer, write_chats, write_model
from test_generation import drafter_of

from dflash import cli
from dflash import measure as measure_module
from dflash.acceptance import AcceptanceStats
from dflash.checkpoint_format import save_drafter
from dflash.decode import greedy
from dflash.generation import Completion
from dflash.measure import Figures, Options, Worker, measure
from dflash.target import Target, load_target
from dflash.tasks import Sample

SAMPLES = [Sample((f"w{i} w{i + 2}", f"w{i + 1}")) for i in range(3)]


@pytest.fixture(scope="module")
def target():
    return Target("tiny", make_model(seed=3), make_tokenizer(), (1, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(target's directory, two drafters' directories, a file of prompts)"""
    place = tmp_path_factory.mktemp("eval")
    model = write_model(place / "model", seed=3)
    loaded = load_target(str(model), layer_ids=(1, 3))
    for seed in (0, 1):
        save_drafter(drafter_of(loaded, seed=seed), place / f"drafter{seed}")
    return model, place / "drafter0", place / "drafter1", write_chats(place / "chats.jsonl", 4)


def completion(ids, seconds=1.0, first=0.5, lengths=(), ties=()):
    return Completion(
        list(ids), "", "length", None, 3, list(lengths), 3, list(ties), seconds, first
    )


def test_later_turns_follow_the_baselines_answers(target):
    options = Options(max_new_tokens=8, transformers=False)
    (found,) = measure([Worker("a", [(target, drafter_of(target))])], SAMPLES, options)
    assert len(found.responses) == 6
    assert found.differences == []
    messages = [{"role": "user", "content": SAMPLES[0].turns[0]}]
    for turn in (0, 1):
        ids = target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        wanted = greedy(target, ids, 8, target.spec.eos_ids).ids
        assert found.baseline[turn].ids == found.responses[turn].ids == wanted
        answer = target.tokenizer.decode(wanted, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": SAMPLES[0].turns[1]}]


def test_workers_share_the_samples_and_every_checkpoint_gets_all(target, monkeypatch):
    pairs = [(target, drafter_of(target, seed=seed)) for seed in (0, 1)]
    options = Options(max_new_tokens=5, transformers=False)
    alone = measure([Worker("a", pairs)], SAMPLES, options)
    plain = measure_module._decode
    barrier, seen = threading.Barrier(2, timeout=20), set()

    def meeting(worker, sample, options):
        name = threading.current_thread().name
        if name in ("a", "b") and name not in seen:
            seen.add(name)
            barrier.wait()  # both are at work before either ends
        return plain(worker, sample, options)

    monkeypatch.setattr(measure_module, "_decode", meeting)
    ticks = []
    both = measure(
        [Worker("a", pairs), Worker("b", pairs)], SAMPLES, options, advance=lambda: ticks.append(1)
    )
    assert seen == {"a", "b"}
    assert len(ticks) == 3
    for one, two in zip(alone, both, strict=True):
        assert [c.ids for c in one.responses] == [c.ids for c in two.responses]
        assert one.acceptance == two.acceptance


def test_figures_by_hand():
    stats = AcceptanceStats(3)
    figures = Figures(
        stats,
        [completion(range(11), 1.5, 0.5, [3, 1]), completion([1, 2, 3], 1.5, 0.5, [2], [1])],
        [completion(range(11), 2.5, 0.5), completion([1, 9, 3], 4.5, 0.5)],
        [4.0, 6.0],
    )
    for response in figures.responses:
        stats.add(response.accept_lengths)
    found = figures.to_dict()
    assert found["acceptance_length_macro"] == found["acceptance_length_pooled"] == 2.0
    assert found["per_position"] == pytest.approx([2 / 3, 1 / 3])
    assert found["length_shares"] == pytest.approx([1 / 3] * 3)
    # 0.1 and 0.5 seconds a token with the drafter; 0.2 and 2.0 without
    assert found["tokens_per_second"] == pytest.approx(1 / 0.3)
    assert found["tokens_per_second_plain"] == pytest.approx(1 / 1.1)
    assert found["speedup"] == pytest.approx(1.1 / 0.3)
    assert found["tokens_per_second_with_prompt"] == pytest.approx((11 / 1.5 + 2) / 2)
    assert found["tokens_per_second_transformers"] == 5.0
    assert found["first_token_seconds"] == 0.5
    assert (found["equal_to_plain"], found["differences"]) == (1, [[1, 1]])
    assert found["differences_at_ties"] == 1
    figures.transformers_rates = []
    assert figures.to_dict()["speedup_over_transformers"] is None


def test_transformers_own_generate_writes_the_same(target):
    assert target.generate([7, 8], 9) == greedy(target, [7, 8], 9, target.spec.eos_ids).ids


def test_eval_compares_checkpoints_and_writes_json(saved, tmp_path, capsys):
    model, one, two, chats = saved
    out = tmp_path / "figures.json"
    code = cli.main(
        f"eval {one} {two} --target {model} --data {chats} --data gsm8k={chats.parent / 'g.jsonl'} "
        f"--max-new-tokens 6 --samples 2 --out {out} --devices cpu,cpu".split()
    )
    assert code == 1  # there is no g.jsonl
    (chats.parent / "g.jsonl").write_text('{"question": "w1 w2"}\n{"question": "w4"}\n')
    code = cli.main(
        f"eval {one} {two} --target {model} --data {chats} --data gsm8k={chats.parent / 'g.jsonl'} "
        f"--max-new-tokens 6 --samples 2 --out {out} --devices cpu,cpu".split()
    )
    shown = capsys.readouterr().out
    assert code == 0
    for text in ("acceptance length", "pooled", "accepted by slot", "first token", "speed-up"):
        assert text in shown
    content = json.loads(out.read_text())
    assert content["settings"]["devices"] == ["cpu", "cpu"]
    assert set(content["tasks"]) == {"chats.jsonl", "gsm8k"}
    for drafters in content["tasks"].values():
        assert set(drafters) == {str(one), str(two)}
        for found in drafters.values():
            assert found["equal_to_plain"] == found["responses"] == 2
            assert found["tokens_per_second_transformers"] > 0


def test_generate_prints_text_and_acceptance(saved, capsys):
    model, one, _, _ = saved
    assert cli.main(["generate", "--drafter", str(one), "--target", str(model), "w1 w2"]) == 0
    text, summary = capsys.readouterr().out.splitlines()[-2:]
    assert text.startswith("w") or not text
    assert "tokens in" in summary
    arguments = f"--target {model} --raw --temperature 1 --no-adaptive --max-new-tokens 5"
    assert cli.main(["generate", "--drafter", str(one), *arguments.split(), "w1", "w2"]) == 0
    out = capsys.readouterr().out
    assert out.count("acceptance length") == 2


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        ("eval {one}", "does not say what its target is", 2),
        ("eval {one} --target {model} --tasks gsm9k", "there is no task 'gsm9k'", 2),
        ("eval {one} --target {model} --data {chats} --samples -1", "--samples is -1", 2),
        ("eval {one} --target {model} --data {chats} --devices tpu:0", "--devices: ", 2),
        ("eval {model} --target {model} --data {chats}", "", 1),
        ("generate --drafter {one} --target {model} --block-size 9 w1", "block_size is 9", 1),
        ("generate --target {model} w1", "required: --drafter", 2),
    ],
)
def test_wrong_command_lines(saved, capsys, arguments, text, code):
    model, one, _, chats = saved
    assert cli.main(arguments.format(model=model, one=one, chats=chats).split()) == code
    err = capsys.readouterr().err
    assert "dflash: " in err
    assert text in err
