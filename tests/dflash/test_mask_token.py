from __future__ import annotations

import pytest

from dflash.errors import ConfigError
from dflash.mask_token import choose_mask_token


class Tokenizer:
    def __init__(self, size, *, mask=None, special=(), added=(), bos=None):
        self.size = size
        self.mask_token_id = mask
        self.all_special_ids = list(special)
        self.added_tokens_decoder = dict.fromkeys(added)
        self.bos_token_id = bos
        self.unk_token_id = None

    def __len__(self):
        return self.size

    def convert_ids_to_tokens(self, token):
        return f"<t{token}>"


def choose(tokenizer, *, vocab_size=100, reserved=(0, 2), used=(5, 6), asked=-1):
    return choose_mask_token(
        tokenizer, vocab_size=vocab_size, reserved=reserved, used=used, asked=asked
    )


def test_as_asked_first():
    assert choose(Tokenizer(90, mask=4), asked=7).id == 7


def test_then_the_tokenizers_own():
    assert choose(Tokenizer(90, mask=4)).id == 4


def test_then_a_row_without_a_token():
    chosen = choose(Tokenizer(90))
    assert chosen.id == 90
    assert "of 10" in chosen.reason


def test_then_a_special_token_that_means_nothing_else_here():
    tokenizer = Tokenizer(100, special=(0, 2, 9), added=(0, 1, 2, 5, 9, 17), bos=1)
    chosen = choose(tokenizer)
    assert chosen.id == 17
    assert "<t17>" in chosen.reason
    assert choose(tokenizer, used=(5, 17)).id == 9
    with pytest.raises(ConfigError, match=r"drafter\.mask_token_id"):
        choose(tokenizer, used=(5, 9, 17))


@pytest.mark.parametrize(("asked", "message"), [(100, "100 rows"), (5, "of the training data")])
def test_an_impossible_one_is_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        choose(Tokenizer(90), asked=asked)
