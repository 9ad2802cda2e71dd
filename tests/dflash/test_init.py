"""A drafter that starts from its target: which layers, folded norms, sizes of queries and keys."""

from __future__ import annotations

import pytest
import torch
from model_dir import make_model, make_tokenizer

from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import ConfigError
from dflash.init import init_from_target, query_key_rms, source_layers
from dflash.target import Target


@pytest.fixture(scope="module")
def target():
    return Target("tiny", make_model(seed=2), make_tokenizer(), (1, 3))


SAMPLE = torch.arange(3, 40)


def drafter_for(target, **changes):
    spec = target.spec
    fields = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 2,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "num_target_layers": spec.num_layers,
        "target_layer_ids": (1, 3),
        "block_size": 4,
        "mask_token_id": 6,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
    }
    drafter = Drafter(DrafterConfig(**(fields | changes)))
    drafter.reset_parameters(torch.Generator().manual_seed(0))
    return drafter


def generator():
    return torch.Generator().manual_seed(7)


def test_the_first_layers_and_the_last():
    assert source_layers(30, 1) == (0,)
    assert source_layers(30, 2) == (0, 29)
    assert source_layers(30, 4) == (0, 1, 2, 29)


def test_layers_are_copied_with_their_norms_folded_in(target):
    drafter = drafter_for(target)
    assert init_from_target(drafter, target, SAMPLE, generator()) == (0, 5)
    x = torch.randn(1, 3, 16, generator=generator())
    for mine, index in zip(drafter.layers, (0, 5), strict=True):
        theirs = target.decoder.layers[index]
        with torch.no_grad():
            for name in ("q_proj", "k_proj", "v_proj"):
                got = getattr(mine.self_attn, name)(mine.input_layernorm(x))
                want = getattr(theirs.self_attn, name)(theirs.input_layernorm(x))
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                mine.mlp(mine.post_attention_layernorm(x)),
                theirs.mlp(theirs.post_attention_layernorm(x)),
                rtol=1e-4,
                atol=1e-5,
            )
        assert torch.equal(mine.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)


def test_queries_and_keys_keep_the_targets_size(target):
    drafter = drafter_for(target)
    init_from_target(drafter, target, SAMPLE, generator())
    layer = target.decoder.layers[0].self_attn
    with torch.no_grad():
        hidden = target.decoder.layers[0].input_layernorm(target.embed(SAMPLE[None]))
        for projection, norm in (
            (layer.q_proj, drafter.layers[0].self_attn.q_norm),
            (layer.k_proj, drafter.layers[0].self_attn.k_norm),
        ):
            heads = projection(hidden).view(-1, target.spec.head_dim)
            size = heads.square().mean(-1).sqrt().mean().item()
            assert norm.weight.tolist() == pytest.approx([size] * target.spec.head_dim)


def test_the_last_tap_comes_in_as_it_is(target):
    drafter = drafter_for(target)
    init_from_target(drafter, target, SAMPLE, generator())
    first, last = drafter.fc.weight.split(16, dim=1)
    assert (last - torch.eye(16)).abs().max() < 0.02
    assert first.abs().max() < 0.02
    again = drafter_for(target)
    init_from_target(again, target, SAMPLE, generator())
    assert torch.equal(again.fc.weight, drafter.fc.weight)


def test_sizes_are_measured_without_leaving_hooks(target):
    layers = target.decoder.layers
    before = [len(layer.self_attn.q_proj._forward_hooks) for layer in layers]
    sizes = query_key_rms(target, SAMPLE, (0, 5))
    assert set(sizes) == {0, 5}
    assert all(size > 0 for pair in sizes.values() for size in pair)
    assert [len(layer.self_attn.q_proj._forward_hooks) for layer in layers] == before


def test_other_sizes_are_refused_and_nothing_is_copied(target):
    drafter = drafter_for(target, num_attention_heads=4)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    with pytest.raises(ConfigError, match=r"q_proj of the target's layer 0 is \(16, 16\)"):
        init_from_target(drafter, target, SAMPLE, generator())
    assert all(torch.equal(before[k], v) for k, v in drafter.state_dict().items())


def test_a_layer_without_a_plain_mlp_gives_its_attention(target):
    from torch import nn

    model = make_model(seed=2)
    for layer in model.model.layers:
        layer.mlp = nn.Identity()  # stands for a mixture of experts
    other = Target("moe", model, make_tokenizer(), (1, 3))
    drafter = drafter_for(target)
    before = drafter.layers[0].mlp.gate_proj.weight.clone()
    init_from_target(drafter, other, SAMPLE, generator())
    assert torch.equal(drafter.layers[0].mlp.gate_proj.weight, before)
    o_proj = model.model.layers[0].self_attn.o_proj.weight
    assert torch.equal(drafter.layers[0].self_attn.o_proj.weight, o_proj)
