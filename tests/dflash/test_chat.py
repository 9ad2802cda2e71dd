from __future__ import annotations

import pytest
from model_dir import SPECIAL, WORDS, make_tokenizer

from dflash.chat import (
    Example,
    encode_conversation,
    encode_prompt,
    encode_text,
    encode_text_prompt,
    with_response,
)
from dflash.errors import DataError

IDS = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
END = IDS["<end>"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(*turns):
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def words(ids):
    return [[*SPECIAL, *WORDS][i] for i in ids]


def supervised(example):
    return words(i for i, own in zip(example.ids, example.loss_mask, strict=True) if own)


def test_the_answer_and_its_end_are_supervised(tokenizer):
    found = encode_conversation(tokenizer, chat("w1 w2", "w3 w4"), (END,), "here")
    assert words(found.ids) == ["<user>", "w1", "w2", "<end>", "<assistant>", "w3", "w4", "<end>"]
    assert supervised(found) == ["w3", "w4", "<end>"]
    assert found.anchors == 2
    assert found.origin == "here"


def test_every_answer_is_supervised_and_questions_are_not(tokenizer):
    found = encode_conversation(tokenizer, chat("w1", "w2", "w3", "w4 w5"), (END,), "here")
    assert supervised(found) == ["w2", "<end>", "w4", "w5", "<end>"]


def test_what_follows_the_end_of_a_turn_is_context_only():
    tokenizer = make_tokenizer(
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> w39 {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    found = encode_conversation(tokenizer, chat("w1", "w2", "w3", "w4"), (END,), "here")
    assert words(found.ids) == [
        "<user>",
        "w1",
        "<end>",
        "w39",
        "<assistant>",
        "w2",
        "<end>",
        "w39",
        "<user>",
        "w3",
        "<end>",
        "w39",
        "<assistant>",
        "w4",
        "<end>",
    ]
    assert supervised(found) == ["w2", "<end>", "w4", "<end>"]


def test_written_tokens_are_taken_as_they_are(tokenizer):
    prompt = chat("w1", "w2", "w3")
    written = [IDS["w7"], IDS["<unk>"], END]
    found = with_response(tokenizer, prompt, (END,), written, "here")
    ids = encode_prompt(tokenizer, prompt, "here")
    assert list(found.ids) == [*ids, *written]
    assert supervised(found) == ["w2", "<end>", "w7", "<unk>", "<end>"]
    # The same conversation as text gives the same tokens.
    as_text = encode_conversation(tokenizer, [*prompt, chat("", "w7 <unk>")[1]], (END,), "here")
    assert as_text == found


def test_an_answer_that_the_template_drops_later_is_not_supervised():
    tokenizer = make_tokenizer(
        "{% for m in messages %}<{{ m['role'] }}> "
        "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }} {% endif %}<end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    found = encode_conversation(tokenizer, chat("w1", "w2", "w3", "w4"), (END,), "here")
    assert supervised(found) == ["w4", "<end>"]


def test_a_template_that_hides_the_last_answer_is_refused():
    tokenizer = make_tokenizer(
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> w38 {% endif %}"
    )
    with pytest.raises(DataError, match=r"f:3: .*data\.responses=always"):
        encode_conversation(tokenizer, chat("w1", "w2"), (END,), "f:3")


def test_a_template_that_raises_is_reported_with_its_words():
    tokenizer = make_tokenizer("{{ raise_exception('two systems at once') }}")
    with pytest.raises(DataError, match="f:3: the target's chat template refuses it: two systems"):
        encode_prompt(tokenizer, chat("w1"), "f:3")


def test_a_base_model_without_template():
    tokenizer = make_tokenizer(None)
    found = encode_conversation(tokenizer, chat("w1 w2 ", "w3"), (END,), "here")
    assert words(found.ids) == ["w1", "w2", "w3", "<end>"]
    assert supervised(found) == ["w3", "<end>"]
    assert words(encode_prompt(tokenizer, chat("w1 w2 "), "here")) == ["w1", "w2"]
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(tokenizer, chat("w1", "w2", "w3"), "here")


def test_cut_and_anchors():
    example = Example((1, 2, 3, 4, 5), (False, True, True, False, True), "x")
    assert example.anchors == 1
    assert example.cut(2) == Example((1, 2), (False, True), "x")
    assert example.cut(2).anchors == 0


def test_a_rendered_text_is_learned_whole_or_after_the_marker(tokenizer):
    text = "<user> w1 <end> <assistant> w2 w3 <end> <user> w4 <end> <assistant> w5 <end>"
    whole = encode_text(tokenizer, text, "", (END,), "here")
    assert all(whole.loss_mask)
    assert words(whole.ids) == text.split()
    found = encode_text(tokenizer, text, "<assistant>", (END,), "here")
    assert found.ids == whole.ids
    assert supervised(found) == ["w2", "w3", "<end>", "w5", "<end>"]
    prompt = encode_text_prompt(tokenizer, text, "<assistant>")
    assert words(prompt) == text.split()[:-2]
    assert encode_text_prompt(tokenizer, text, "") is None
    with pytest.raises(DataError, match=r"f:3: the text has no 'w9' \(data\.marker\)"):
        encode_text(tokenizer, text, "w9", (END,), "f:3")


def test_a_text_gets_the_begin_token_that_the_tokenizer_adds_once():
    from tokenizers import processors

    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<spare>"
    assert words(encode_text(tokenizer, "w1 w2", "", (END,), "x").ids) == ["w1", "w2"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<spare> $A", special_tokens=[("<spare>", IDS["<spare>"])]
    )
    for text in ("w1 w2", "<spare> w1 w2"):
        found = encode_text(tokenizer, text, "w1", (END,), "x")
        assert words(found.ids) == ["<spare>", "w1", "w2"]
