"""`dflash data`: what it counts, what it shows, what it warns of."""

from __future__ import annotations

import json

import pytest
from model_dir import SPECIAL, WORDS, make_tokenizer, write_model

from dflash import cli
from dflash.chat import Example
from dflash.config import DataSettings
from dflash.data import Conversation
from dflash.errors import DataError
from dflash.survey import survey
from dflash.target import TargetText
from dflash.token_view import coloured, marked, token_texts

IDS = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
END = IDS["<end>"]


def text_of(template="default", reads=128, **changes):
    tokenizer = make_tokenizer() if template == "default" else make_tokenizer(template)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return TargetText("tiny", tokenizer, (END,), reads)


def talk(origin, *texts):
    roles = ["user", "assistant"]
    return Conversation(
        tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)), origin
    )


def kinds(found, *, serious=True):
    return {remark.kind for remark in found.remarks if remark.serious is serious}


def test_rows_are_counted_as_training_takes_them():
    rows = [
        talk("a", "w1 w2", "w3 w4"),  # 8 tokens, 3 learned
        talk("b", "w1"),  # waits: 4 tokens
        talk("c", "w1", ""),  # one learned token: no block
        talk("d", "w1", " ".join(["w2"] * 20)),  # 25 tokens, cut to 16
        talk("e", " ".join(["w1"] * 15)),  # the prompt fills all
    ]
    bad = [DataError("x", "f", 3, kind="not a conversation")]
    found = survey(rows, text_of(), DataSettings(max_length=16), bad=bad, show=2)
    assert (found.rows, found.kept, found.waiting) == (6, 3, 1)
    assert found.skipped == {
        "not a conversation": 1,
        "too short for a block": 1,
        "prompt too long": 1,
    }
    assert (found.tokens, found.learned) == (8 + 4 + 16, 3 + 12)
    assert (found.cut, found.cut_tokens) == (1, 9)
    assert found.histogram() == [(16, 3)]
    assert [example.origin for example in found.shown] == ["a", "b"]
    assert kinds(found) == {"truncated"}
    assert kinds(found, serious=False) == {"no-marks", "waiting"}


def test_never_and_always_are_said():
    found = survey([talk("b", "w1")], text_of(), DataSettings(responses="never"))
    assert (found.kept, dict(found.skipped)) == (0, {"without an answer": 1})
    found = survey([talk("a", "w1", "w2")], text_of(), DataSettings(responses="always"))
    assert "rewritten" in kinds(found, serious=False)


def test_the_histogram_doubles_and_has_no_holes():
    rows = [talk("a", "w1", "w2 w3"), talk("b", "w1", " ".join(["w2"] * 60))]
    found = survey(rows, text_of(), DataSettings())
    assert found.histogram() == [(16, 1), (32, 0), (64, 0), (128, 1)]
    assert survey([], text_of(), DataSettings()).histogram() == []


BOS = (
    "{{ bos_token }} {{ bos_token }} {% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} "
    "<end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
NO_END = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PROMPT_IS_NOTHING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }} <end> {% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "answer", "max_length", "expected"),
    [
        ("default", "w2 w3", 64, set()),
        (BOS, "w2 w3", 64, {"bos-doubled"}),
        (NO_END, "w2 w3", 64, {"no-eos"}),
        (PROMPT_IS_NOTHING, "w2 w3", 64, {"mask-full"}),
        ("default", "w2 w3", 3, {"mask-empty", "truncated"}),
        ("default", "<think> w2 </think> w3", 64, {"thinking"}),
    ],
)
def test_what_looks_wrong_is_named_with_the_row(template, answer, max_length, expected):
    text = text_of(template)
    text.tokenizer.add_tokens(["<think>", "</think>"])
    text.tokenizer.bos_token = "<spare>"
    found = survey([talk("f:7", "w1", answer)], text, DataSettings(max_length=max_length))
    assert kinds(found) == expected
    for remark in found.remarks:
        assert not remark.serious or "1 row, the first f:7" in remark.text


def test_a_target_without_end_token_or_template():
    text = TargetText("tiny", make_tokenizer(None), (), 64)
    found = survey([talk("a", "w1", "w2 w3")], text, DataSettings())
    assert kinds(found) == {"no-end-token", "no-eos"}
    assert "no-template" in kinds(found, serious=False)


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_each_token_has_its_own_text_also_inside_a_character():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a é€")["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " ", "", "é", "", "", "€"]
    assert token_texts(tokenizer, ids[:-1])[-1] == "\ufffd"  # cut inside a character
    words = make_tokenizer()
    assert token_texts(words, [IDS["w1"], IDS["w2"], END]) == ["w1", " w2", " <end>"]


def test_the_two_forms_of_a_sequence():
    tokenizer = byte_tokenizer()
    ids = tuple(tokenizer("ab\nc")["input_ids"])
    example = Example(ids, (False, True, True, False), "x")
    assert marked(tokenizer, example) == "  a\n+ b¦\\n\n  c"
    shown = coloured(tokenizer, example)
    assert "\x1b[2ma\x1b[0m" in shown
    assert "\x1b[30;102mb\x1b[0m" in shown
    assert "\x1b[30;42m⏎\x1b[0m\n" in shown


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "model")


def run(model, path, *more):
    return cli.main(["data", "--target", str(model), "--data", str(path), *more])


GOOD = '{"prompt": "w1 w2", "response": "w3 w4"}\n'


def test_the_command_prints_counts_tokens_and_warnings(model, tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text(GOOD)
    assert run(model, path, "data.responses=missing", "--show", "3") == 0
    out = capsys.readouterr().out
    assert f"{path}:1: 8 tokens, 3 of them in the loss" in out
    assert "\n+  w3¦ w4¦ <end>\n" in out
    assert "in the loss  3  37.5 %" in out
    assert "note: no-marks" in out
    assert "warning" not in out
    assert run(model, path, "data.responses=missing", "--show", "1", "--color", "always") == 0
    assert "\x1b[30;" in capsys.readouterr().out


def test_json_holds_the_figures_and_the_tokens(model, tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text(GOOD + "nope\n")
    assert run(model, path, "--json", "data.on_bad=skip", "--show", "1", "data.limit=9") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["kept"], found["skipped"]) == (2, 1, {"no valid JSON": 1})
    tokens = found["shown"][0]["tokens"]
    assert [t["text"] for t in tokens if t["learned"]] == [" w3", " w4", " <end>"]
    assert tokens[-1] == {"id": END, "text": " <end>", "learned": True}


def test_the_exit_code_says_whether_training_would_stop(model, tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text(GOOD + "nope\n")
    assert run(model, path) == 1
    out = capsys.readouterr().out
    assert f"skipped: {path}:2: no valid JSON" in out
    assert "training would stop at the first of these 1 rows (data.on_bad)" in out
    assert run(model, path, "data.on_bad=skip") == 0
    assert run(model, path, "data.on_bad=skip", "data.max_length=7") == 1
    assert run(tmp_path / "nowhere", path) == 2
    assert run(model, path, "--show", "-1") == 2
    assert run(model, path, "--shw", "1") == 2
    assert "did you mean --show?" in capsys.readouterr().err
