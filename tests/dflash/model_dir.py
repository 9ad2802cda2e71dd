"""A tiny language model, tokenizer and chat template, as a directory that a run can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>", "<system>", "<spare>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=template,
    )


def make_model(seed: int = 0, hidden: int = 16, layers: int = 6):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.6,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def write_model(directory: Path, **options) -> Path:
    make_model(**options).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def write_chats(path: Path, count: int = 10) -> Path:
    """Prompts of different lengths, every third one with a response."""
    lines = []
    for i in range(count):
        words = " ".join(WORDS[(3 * i + k) % len(WORDS)] for k in range(2 + i % 4))
        line = {"prompt": words}
        if i % 3 == 0:
            line["response"] = " ".join(WORDS[(5 * i + k) % len(WORDS)] for k in range(6))
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path
