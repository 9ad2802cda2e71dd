from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.head_rows import supervised_tokens, top_tokens


@dataclass
class Example:
    ids: list[int]
    loss_mask: list[bool]


def test_supervised_tokens_are_the_labels():
    examples = [Example([1, 2, 3], [False, True, True]), Example([4, 3], [False, True])]
    assert supervised_tokens(examples) == {2, 3}


def test_top_tokens_are_taken_where_a_supervised_token_is_predicted():
    head = lambda hidden: hidden  # noqa: E731
    last = torch.tensor([[9.0, 1, 0, 0, 0], [0, 9, 8, 0, 0], [0, 0, 0, 9, 8], [9, 0, 0, 0, 8]])
    mask = [True, False, True, True]  # predicted at positions 1 and 2
    assert top_tokens(last, mask, head, 1) == {1, 3}
    assert top_tokens(last, mask, head, 2) == {1, 2, 3, 4}
    assert top_tokens(last, [True, False, False, False], head, 2) == set()


def test_many_positions_are_split():
    last = torch.eye(7).repeat(300, 1)
    sizes = []

    def head(hidden):
        sizes.append(len(hidden))
        return hidden

    assert top_tokens(last, [True] * len(last), head, 1) == set(range(7))
    assert max(sizes) <= 512
    assert sum(sizes) == len(last) - 1
