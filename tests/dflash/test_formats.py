"""The layouts told apart, and their configs translated: numbers written out, not computed."""

from __future__ import annotations

import pytest

from dflash.drafter_config import DrafterConfig
from dflash.errors import CheckpointError, ConfigError
from dflash.formats import export_config, our_name, recognise, states_depth, to_zlab

BODY = ["fc.weight", "hidden_norm.weight", "norm.weight"]
TORCHSPEC = ["context_proj.weight", "context_norm.weight", "final_norm.weight"]


@pytest.fixture
def config(make_drafter):
    return make_drafter().config  # taps 0 and 2 of 4 layers, blocks of 4


@pytest.fixture
def speculators(config):
    return export_config(config, "speculators", ("some/target", ("LlamaForCausalLM",)))


@pytest.fixture
def torchspec(config):
    raw = config.to_zlab_dict()
    nested = raw.pop("dflash_config")
    return raw | {
        "model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": 2,
        "target_num_hidden_layers": 4,
        "target_layer_ids": nested["target_layer_ids"],
        "mask_token_id": nested["mask_token_id"],
    }


@pytest.mark.parametrize(
    ("raw", "names", "layout"),
    [
        ({"dflash_config": {}}, [], "zlab"),
        ({"architectures": ["DFlashDraftModel"]}, [], "zlab"),
        ({"model_type": "qwen3"}, BODY, "zlab"),
        ({"speculators_model_type": "dflash"}, BODY, "speculators"),
        (
            {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]},
            BODY,
            "speculators",
        ),
        ({"model_type": "dflash"}, BODY, "torchspec"),
        ({"model_type": "qwen3"}, TORCHSPEC, "torchspec"),
        ({"dflash_config": {}}, [*BODY, *TORCHSPEC[:1]], "zlab"),
    ],
)
def test_layouts_are_recognised(raw, names, layout):
    assert recognise(raw, names) == layout


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"speculators_model_type": "eagle3"}, "is 'eagle3': a drafter of another method"),
        ({"transformer_layer_config": {}}, "speculators_model_type is None"),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            r"no DFlash drafter: model_type 'llama', architectures \['LlamaForCausalLM'\]",
        ),
    ],
)
def test_what_is_no_drafter_says_what_it_is(raw, text):
    with pytest.raises(CheckpointError, match=text):
        recognise(raw, ["model.embed_tokens.weight"])


def test_speculators_counts_layers_from_the_embedding(config, speculators):
    assert speculators["aux_hidden_state_layer_ids"] == [1, 3]
    assert speculators["mask_token_id"] == 36
    assert speculators["draft_vocab_size"] == 37
    proposal = speculators["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 3
    assert speculators["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["LlamaForCausalLM"],
    }
    inner = speculators["transformer_layer_config"]
    assert inner["rope_theta"] == inner["rope_parameters"]["rope_theta"] == 1000.0
    assert "dflash_config" not in inner
    assert DrafterConfig.from_zlab_dict(to_zlab(speculators, "speculators")) == config


def test_speculators_stores_only_what_is_not_qwen3s_default(speculators):
    transformers = pytest.importorskip("transformers")
    raw = speculators | {"transformer_layer_config": {"num_hidden_layers": 5}}
    read = DrafterConfig.from_zlab_dict(to_zlab(raw, "speculators", 36))
    default = transformers.Qwen3Config()
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
                 "num_key_value_heads", "vocab_size", "rms_norm_eps",
                 "max_position_embeddings", "initializer_range"):  # fmt: skip
        assert getattr(read, name) == getattr(default, name), name
    assert read.rope_theta == 10000.0
    assert read.num_target_layers == 36


def test_speculators_default_taps(speculators):
    raw = {k: v for k, v in speculators.items() if k != "aux_hidden_state_layer_ids"}
    raw["transformer_layer_config"] = speculators["transformer_layer_config"] | {
        "num_target_layers": 36
    }
    found = to_zlab(raw, "speculators")
    assert found["dflash_config"]["target_layer_ids"] == [1, 17, 32]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"aux_hidden_state_layer_ids": [0, 2]}, "has 0, the embedding's output"),
        ({"target_hidden_size": 64}, "16 wide and its target 64"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "of the kind 'llama'"),
        ({"transformer_layer_config": None}, "lacks 'transformer_layer_config'"),
        ({"transformer_layer_config": {"hidden_size": 16}}, "how many layers its target has"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'"),
        ({"block_size": None}, "lacks 'block_size'"),
        ({"sample_from_anchor": True}, "sets sample_from_anchor"),
    ],
)
def test_speculators_configs_that_cannot_be_ours(speculators, changes, text):
    with pytest.raises(ConfigError, match=text):
        DrafterConfig.from_zlab_dict(to_zlab(speculators | changes, "speculators"))


def test_a_tap_of_the_last_layer_has_no_place_in_speculators(make_drafter):
    config = make_drafter(target_layer_ids=(0, 3)).config
    with pytest.raises(ConfigError, match="last layer, 3"):
        export_config(config, "speculators", ("t", ()))
    assert export_config(config, "zlab")["dflash_config"]["target_layer_ids"] == [0, 3]


def test_speculators_needs_its_verifier(config):
    with pytest.raises(ConfigError, match="names the target"):
        export_config(config, "speculators")


def test_torchspec_counts_taps_where_others_count_layers(config, torchspec):
    assert DrafterConfig.from_zlab_dict(to_zlab(torchspec, "torchspec")) == config
    del torchspec["target_num_hidden_layers"]
    assert DrafterConfig.from_zlab_dict(to_zlab(torchspec, "torchspec", 4)) == config
    with pytest.raises(ConfigError, match="name the target"):
        to_zlab(torchspec, "torchspec")
    with pytest.raises(ConfigError, match=r"is 3, .*number of taps, but .* has 2"):
        to_zlab(torchspec | {"num_target_layers": 3}, "torchspec", 4)
    del torchspec["target_layer_ids"]
    with pytest.raises(ConfigError, match="lacks 'target_layer_ids'"):
        to_zlab(torchspec, "torchspec", 4)


def test_torchspec_names():
    assert [our_name(n, "torchspec") for n in TORCHSPEC] == BODY
    assert our_name("layers.0.mlp.up_proj.weight", "torchspec") == "layers.0.mlp.up_proj.weight"
    assert our_name("context_proj.weight", "zlab") == "context_proj.weight"


def test_who_states_the_targets_depth(config, speculators, torchspec):
    assert states_depth(config.to_zlab_dict(), "zlab")
    assert states_depth(speculators, "speculators")
    assert not states_depth({"transformer_layer_config": {}}, "speculators")
    assert states_depth(torchspec, "torchspec")
    del torchspec["target_num_hidden_layers"]
    assert not states_depth(torchspec, "torchspec")


@pytest.mark.parametrize("layout", ["zlab", "sglang"])
def test_no_code_is_asked_for(config, layout):
    assert "auto_map" not in export_config(config, layout)
