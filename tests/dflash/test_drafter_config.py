from __future__ import annotations

import json

import pytest

from dflash.drafter_config import DrafterConfig
from dflash.errors import ConfigError


@pytest.fixture
def config(make_drafter):
    return make_drafter().config


def test_round_trip_through_json(config):
    for changes in (
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"eos_token_id": (2, 3), "bos_token_id": 1, "max_position_embeddings": 77},
    ):
        wanted = DrafterConfig(**(vars(config) | changes))
        raw = json.loads(json.dumps(wanted.to_zlab_dict()))
        assert DrafterConfig.from_zlab_dict(raw) == wanted


def test_every_entry_a_reader_wants_is_there(config):
    raw = config.to_zlab_dict()
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
    assert raw["dflash_config"]["mask_token_id"] == 36
    assert raw["num_target_layers"] == 4
    assert raw["layer_types"] == ["full_attention", "full_attention"]
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1000.0
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["tie_word_embeddings"] is False


@pytest.mark.parametrize("spelling", ["four", "five"])
def test_either_rope_spelling_alone_is_enough(config, spelling):
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    wanted = DrafterConfig(**(vars(config) | {"rope_scaling": scaling, "rope_theta": 1e6}))
    raw = wanted.to_zlab_dict()
    for key in ["rope_parameters"] if spelling == "four" else ["rope_theta", "rope_scaling"]:
        del raw[key]
    assert DrafterConfig.from_zlab_dict(raw) == wanted


def test_older_and_newer_published_files(config):
    older = config.to_zlab_dict()
    del older["dflash_config"]["block_size"]
    newer = config.to_zlab_dict()
    del newer["block_size"]
    assert DrafterConfig.from_zlab_dict(older) == DrafterConfig.from_zlab_dict(newer) == config


def test_layer_ids_left_out_follow_the_formula(config):
    raw = config.to_zlab_dict() | {"num_target_layers": 36, "num_hidden_layers": 5}
    del raw["dflash_config"]["target_layer_ids"], raw["layer_types"]
    assert DrafterConfig.from_zlab_dict(raw).target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding-window"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"dflash_config": {"mask_token_id": 1, "causal": True}}, "causal"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "lacks 'mask_token_id'"),
    ],
)
def test_relatives_of_dflash_are_refused(config, changes, text):
    with pytest.raises(ConfigError, match=text):
        DrafterConfig.from_zlab_dict(config.to_zlab_dict() | changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": 37}, "mask_token_id 37"),
        ({"target_layer_ids": ()}, "at least one"),
        ({"target_layer_ids": (1, 1)}, "different layers"),
        ({"target_layer_ids": (0, 4)}, "beyond the target's last layer, 3"),
    ],
)
def test_contradictions_are_named(config, changes, text):
    with pytest.raises(ConfigError, match=text):
        DrafterConfig(**(vars(config) | changes))
