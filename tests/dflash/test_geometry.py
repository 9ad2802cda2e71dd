from __future__ import annotations

import itertools

import pytest
import torch

from dflash.errors import ConfigError
from dflash.geometry import block_positions, block_token_ids, decay_gamma, target_layer_ids


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [  # the published values
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        # 7.5 rounds to 8 and 20.5 to 20: half to even
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 1, (18,)),
        (3, 1, (1,)),
        (5, 2, (1, 2)),
    ],
)
def test_target_layer_ids(layers, taps, ids):
    assert target_layer_ids(layers, taps) == ids


def test_layer_ids_are_different_layers_for_every_size():
    for layers in range(4, 70):
        for taps in range(1, layers - 2):
            ids = target_layer_ids(layers, taps)
            assert len(set(ids)) == taps
            assert sorted(ids) == list(ids)
            assert taps == 1 or (ids[0] == 1 and ids[-1] == layers - 3)


@pytest.mark.parametrize(("layers", "taps"), [(10, 0), (10, 8), (0, 1), (3, 2)])
def test_impossible_taps(layers, taps):
    with pytest.raises(ConfigError, match=r"tap|layers"):
        target_layer_ids(layers, taps)


def test_decay_gamma_goes_through_the_published_points_and_grows():
    assert [decay_gamma(b) for b in (8, 10, 16)] == [4.0, 5.0, 7.0]
    values = [decay_gamma(b) for b in range(2, 40)]
    assert values[0] == 1.0
    assert all(a < b for a, b in itertools.pairwise(values))
    with pytest.raises(ConfigError, match="block_size is 1"):
        decay_gamma(1)


def test_block_positions_and_tokens_by_hand():
    anchors = torch.tensor([[2, 5], [0, 1]])
    assert block_positions(anchors, 3).tolist() == [[2, 3, 4, 5, 6, 7], [0, 1, 2, 1, 2, 3]]
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
    assert block_token_ids(ids, anchors, 3, 99).tolist() == [
        [12, 99, 99, 15, 99, 99],
        [20, 99, 99, 21, 99, 99],
    ]


def test_block_positions_restart_with_the_packed_document():
    anchors = torch.tensor([[1, 4]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert block_positions(anchors, 2, positions).tolist() == [[1, 2, 1, 2]]
