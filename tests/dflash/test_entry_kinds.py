from __future__ import annotations

import pytest
from format_files import fitting_config

from dflash.entry_kinds import entry_problems
from dflash.formats import export_config


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_what_we_write_is_right(layout):
    raw = export_config(fitting_config(), layout, ("t", ("A",)))
    assert entry_problems(raw) == []


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"block_size": True}, "block_size is True, not a whole number"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0, not a whole number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, not a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, not a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, not a number above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null, not a number above 0"),
        ({"layer_types": [1]}, "layer_types is [1], not a list of texts"),
        ({"transformer_layer_config": {"head_dim": "8"}}, "head_dim is '8', not a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', not a token or a list of tokens"),
    ],
)
def test_wrong_kinds_are_named(raw, text):
    assert entry_problems(raw) == [text]


def test_null_means_left_out_and_unknown_entries_are_free():
    assert entry_problems({"rope_scaling": None, "bos_token_id": None, "anything": object()}) == []
