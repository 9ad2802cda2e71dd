from __future__ import annotations

import cmath

import pytest
import torch

from dflash.errors import ConfigError
from dflash.rope import Rope, apply_rope, rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"truncate": False},
]


def test_rotation_is_multiplication_by_a_complex_phase():
    dim, theta = 8, 100.0
    x = torch.randn(1, 2, 3, dim, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 7, 1000]])
    turned = apply_rope(x, *Rope(dim, theta, None, 2048)(positions))
    for head in range(2):
        for row, position in enumerate([0, 7, 1000]):
            for i in range(dim // 2):
                pair = complex(x[0, head, row, i], x[0, head, row, i + dim // 2])
                want = pair * cmath.exp(1j * position * theta ** (-2 * i / dim))
                got = complex(turned[0, head, row, i], turned[0, head, row, i + dim // 2])
                assert abs(got - want) < 2e-4


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize(("dim", "theta"), [(64, 10000.0), (128, 1e6)])
def test_scalings_equal_transformers(scaling, dim, theta):
    configs = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = configs.LlamaConfig(
        hidden_size=dim * 2,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=4096,
        rope_theta=theta,
        rope_scaling=dict(scaling),
    )
    want, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    got, got_amplitude = rope_frequencies(dim, theta, scaling, 4096)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
    assert got_amplitude == pytest.approx(amplitude)


def test_default_equals_no_scaling_and_old_spelling_is_read():
    plain, _ = rope_frequencies(8, 100.0, None, 64)
    assert torch.equal(plain, rope_frequencies(8, 100.0, {"rope_type": "default"}, 64)[0])
    linear, _ = rope_frequencies(8, 100.0, {"type": "linear", "factor": 2}, 64)
    assert torch.equal(plain / 2, linear)


def test_frequencies_stay_float32_in_a_bfloat16_module():
    rope = Rope(8, 10000.0, None, 4096)
    before = rope(torch.tensor([[4000]]))
    after = rope.to(torch.bfloat16)(torch.tensor([[4000]]))
    assert torch.equal(before[0], after[0])
    assert list(rope.state_dict()) == []


@pytest.mark.parametrize(
    ("dim", "scaling", "text"),
    [
        (7, None, "head_dim is 7"),
        (8, {"rope_type": "longrope"}, "longrope"),
        (8, {"rope_type": "linear"}, "lacks the entry 'factor'"),
        (8, {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_cannot_be_done_is_said(dim, scaling, text):
    with pytest.raises(ConfigError, match=text):
        rope_frequencies(dim, 100.0, scaling, 64)
