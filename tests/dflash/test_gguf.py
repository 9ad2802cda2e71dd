"""A GGUF file comes out as the model it was made from, once, whole or not at all."""

from __future__ import annotations

import threading

import gguf
import numpy as np
import pytest
import torch
from model_dir import make_model

from dflash import gguf as gguf_module
from dflash.errors import TargetError
from dflash.gguf import cache_root, packaged_gguf, unpacked_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, heads):
    """ggml turns neighbours together where transformers turns the halves of a head."""
    rows = weight.reshape(heads, 2, -1, weight.shape[1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture="llama", extra=()):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(config.vocab_size - 3))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        part, kind = name.rsplit(".", 1)
        value = tensor.float().numpy()
        if "layers." in part:
            _, _, number, rest = part.split(".", 3)
            stored = f"blk.{number}.{NAMES[rest]}.{kind}"
            if rest.endswith(("q_proj", "k_proj")):
                heads = (
                    config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads
                )
                value = interleaved(value, heads)
        else:
            stored = f"{NAMES[part]}.{kind}"
        writer.add_tensor(stored, np.ascontiguousarray(value))
    for name in extra:
        writer.add_tensor(name, np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    return make_model(seed=4)


@pytest.fixture(scope="module")
def file(tmp_path_factory, model):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


def test_the_model_comes_out_as_it_was(tmp_path, model, file):
    from transformers import AutoModelForCausalLM

    said = []
    place = unpacked_gguf(file, root=tmp_path, say=said.append)
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 31, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert len(said) == 1
    assert unpacked_gguf(file, root=tmp_path, say=said.append) == place
    assert len(said) == 1, "the second time it is found"


def test_another_content_is_another_place(tmp_path, file):
    other = write_gguf(tmp_path / file.name, make_model(seed=5))
    assert unpacked_gguf(file, root=tmp_path) != unpacked_gguf(other, root=tmp_path)


def test_threads_that_unpack_at_once_get_one_whole_directory(tmp_path, file):
    barrier = threading.Barrier(2)
    found = []

    def unpack():
        barrier.wait(20)
        found.append(unpacked_gguf(file, root=tmp_path))

    threads = [threading.Thread(target=unpack) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert [p.name for p in (tmp_path / "gguf").iterdir()] == [found[0].name]
    assert (found[0] / "model.safetensors").is_file()


def test_what_fails_half_way_leaves_nothing(tmp_path, file, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(gguf_module, "_save_tokenizer", fail)
    with pytest.raises(TargetError, match=r"cannot be written to .*disk full.*DFLASH_CACHE"):
        unpacked_gguf(file, root=tmp_path)
    assert list((tmp_path / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"architecture": "mamba"}, "mamba"),
        ({"extra": ["blk.0.ffn_gate_exps.weight"]}, "which no plain decoder has"),
    ],
)
def test_models_of_another_kind_are_refused(tmp_path, model, options, text):
    path = write_gguf(tmp_path / "odd.gguf", model, **options)
    with pytest.raises(TargetError, match=text):
        unpacked_gguf(path, root=tmp_path)
    assert not [p for p in (tmp_path / "gguf").glob("*") if p.is_dir()]


def test_files_that_are_none(tmp_path):
    with pytest.raises(TargetError, match="there is no file"):
        unpacked_gguf(tmp_path / "none.gguf", root=tmp_path)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(TargetError, match=r"damaged\.gguf"):
        unpacked_gguf(damaged, root=tmp_path)


def test_the_cache_has_a_place_that_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("DFLASH_CACHE")
    assert cache_root().name == "dflash"


def test_a_package_that_is_not_there():
    assert packaged_gguf("no-such-distribution") is None
