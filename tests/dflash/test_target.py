"""The target against transformers' own forward: features, decoding steps, answers, threads."""

from __future__ import annotations

import threading

import pytest
import torch
from model_dir import make_model, make_tokenizer, write_model

from dflash.errors import GenerationError, TargetError
from dflash.lean import LeanDecoder, project
from dflash.respond import plan_batches, respond
from dflash.taps import Taps
from dflash.target import Target, load_target

WAIT_S = 20.0


def config_of(kind: str):
    import transformers as hf

    common = {
        "vocab_size": 47,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.6,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    scaled = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    }
    return {
        "llama": lambda: hf.LlamaConfig(**common, tie_word_embeddings=True),
        "llama3": lambda: hf.LlamaConfig(**common, rope_parameters=scaled),
        "qwen3": lambda: hf.Qwen3Config(**common, head_dim=8),
        "qwen2": lambda: hf.Qwen2Config(**common),
        "mistral": lambda: hf.MistralConfig(**common, sliding_window=8),
        "gemma2": lambda: hf.Gemma2Config(**common, head_dim=8, query_pre_attn_scalar=8),
    }[kind]()


def model_of(kind: str):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config_of(kind)).eval().float()


KINDS = ["llama", "llama3", "qwen3", "qwen2", "mistral", "gemma2"]
LEAN = {"llama", "llama3", "qwen3", "qwen2"}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return model_of(kind)


@pytest.fixture
def target(model):
    return Target("tiny", model, make_tokenizer(), (1, 4, 2))


def ids_of(rows: int, length: int, seed: int = 0):
    return torch.randint(3, 47, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference(model, ids_1S):
    """transformers' own: hidden states after each layer, and logits."""
    out = model(input_ids=ids_1S, output_hidden_states=True, use_cache=False)
    return out.hidden_states, out.logits


def test_features_are_the_layers_outputs_in_the_taps_order(model, target):
    ids = ids_of(3, 12)
    lengths = torch.tensor([12, 5, 1])
    context, last = target.features(ids, lengths, last_hidden=True)
    assert context.shape == (3, 12, 48)
    for row, length in enumerate(lengths.tolist()):
        hidden, logits = reference(model, ids[row : row + 1, :length])
        want = torch.cat([hidden[layer + 1] for layer in (1, 4, 2)], dim=-1)
        torch.testing.assert_close(context[row, :length], want[0], rtol=1e-4, atol=1e-4)
        assert not context[row, length:].any()
        assert not last[row, length:].any()
        # After the final norm once: the head on it gives the model's own logits.
        got = target.head(last[row, :length])
        if not hasattr(model.config, "final_logit_softcapping"):
            torch.testing.assert_close(got, logits[0], rtol=1e-4, atol=1e-4)


def test_features_do_not_depend_on_what_the_padding_is(target):
    ids, other = ids_of(2, 10), ids_of(2, 10, seed=9)
    lengths = torch.tensor([10, 4])
    other[0], other[1, :4] = ids[0], ids[1, :4]
    got, want = (target.features(x, lengths, last_hidden=True) for x in (ids, other))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_no_layer_behind_the_last_tap_runs(model):
    target = Target("tiny", model, make_tokenizer(), (0, 2))
    ran = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(target.decoder.layers)
    ]
    target.features(ids_of(1, 6), torch.tensor([6]), last_hidden=False)
    assert ran == [0, 1, 2]
    target.features(ids_of(1, 6), torch.tensor([6]), last_hidden=True)
    assert ran[3:] == [0, 1, 2, 3, 4, 5]
    for hook in hooks:
        hook.remove()


def test_steps_and_crops_equal_one_whole_forward(model, target, kind):
    assert (target.lean is not None) == (kind in LEAN)
    ids = ids_of(1, 24)
    hidden, logits = reference(model, ids)
    cache = target.new_cache(32)
    pieces = []
    for start, end in ((0, 7), (7, 8), (8, 12), (12, 24)):
        if start == 12:  # a rejected draft
            target.step(ids_of(1, 5, seed=3), cache, taps=True)
            cache.crop(12)
        pieces.append(target.step(ids[:, start:end], cache, taps=True))
    assert cache.length == 24
    if not hasattr(model.config, "final_logit_softcapping"):
        got = torch.cat([piece[0] for piece in pieces], dim=1)
        torch.testing.assert_close(got, logits, rtol=1e-3, atol=1e-3)
    context = torch.cat([piece[1] for piece in pieces], dim=1)
    want = torch.cat([hidden[layer + 1] for layer in (1, 4, 2)], dim=-1)
    torch.testing.assert_close(context, want, rtol=1e-3, atol=1e-3)
    with pytest.raises(TargetError, match="a cache for 32 tokens holds 24; 9 more do not fit"):
        target.step(ids_of(1, 9), cache, taps=False)
    with pytest.raises(TargetError, match="cannot be cropped to 25"):
        cache.crop(25)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_answers_equal_transformers_greedy_alone(model, target, kind, batch_size):
    prompts = [ids_of(1, n, seed=n)[0].tolist() for n in (3, 9, 4, 1, 6)]
    limit, stops = 14, (2, 11)
    told = []
    found = respond(target, prompts, limit, batch_size, told.append, stops)
    for prompt, answer in zip(prompts, found, strict=True):
        ids = list(prompt)
        for _ in range(limit):
            ids.append(int(reference(model, torch.tensor([ids]))[1][0, -1].argmax()))
            if ids[-1] in stops:
                break
        assert answer == ids[len(prompt) :]
    assert told[-1].prompts == 5
    assert told[-1].tokens == sum(map(len, found))


def test_threads_tap_one_model_apart(model):
    """One thread is inside its forward while another one has other taps, and a third none."""
    first = Target("tiny", model, make_tokenizer(), (1,))
    second = first.with_taps((4, 0))
    ids, lengths = ids_of(1, 6), torch.tensor([6])
    want_first = first.features(ids, lengths, last_hidden=True)[0]
    want_second = second.features(ids, lengths, last_hidden=True)[0]
    inside, leave = threading.Event(), threading.Event()

    def stand_still(*_):
        if threading.current_thread().name == "slow":
            inside.set()
            assert leave.wait(WAIT_S)

    hook = first.decoder.layers[3].register_forward_hook(stand_still)
    found = []
    slow = threading.Thread(
        target=lambda: found.append(first.features(ids, lengths, last_hidden=True)[0]), name="slow"
    )
    slow.start()
    assert inside.wait(WAIT_S)
    assert torch.equal(second.features(ids, lengths, last_hidden=True)[0], want_second)
    with torch.no_grad():
        model(input_ids=ids)  # no taps open in this thread
    leave.set()
    slow.join(WAIT_S)
    hook.remove()
    assert torch.equal(found[0], want_first)
    assert getattr(Taps._of_thread, "open", None) is None


def test_targets_share_the_weights_on_one_device(target):
    assert target.on("cpu").embed_weight is target.embed_weight
    assert target.with_taps((0,)).layer_ids == (0,)
    assert all(not p.requires_grad for p in target.decoder.parameters())


@pytest.mark.parametrize("taps", [(6,), (-1,), (1, 1)])
def test_taps_that_cannot_be(target, taps):
    with pytest.raises(TargetError, match=r"cannot be tapped: 'tiny' has the layers 0\.\.5"):
        target.with_taps(taps)


def test_features_without_taps_are_refused(target):
    with pytest.raises(TargetError, match="loaded without layers to tap"):
        target.with_taps(()).features(ids_of(1, 3), torch.tensor([3]), last_hidden=True)


class TestAnswerRequests:
    def test_bad_ones(self):
        target = Target("tiny", make_model(), make_tokenizer())
        with pytest.raises(GenerationError, match="prompt 1 of the batch is empty"):
            respond(target, [[3], []], 4)
        with pytest.raises(GenerationError, match="max_new_tokens is 0"):
            respond(target, [[3]], 0)
        with pytest.raises(GenerationError, match="batch size of responses is 0"):
            respond(target, [[3]], 4, 0)

    def test_batches_are_planned_by_length_alone(self):
        prompts = [[1] * n for n in (3, 9, 4, 1, 9)]
        assert plan_batches(prompts, 2) == [[1, 4], [2, 0], [3]]
        assert plan_batches([], 2) == []


class TestSpec:
    def test_fields_and_fingerprint(self, tmp_path):
        directory = write_model(tmp_path / "model")
        target = load_target(str(directory))
        spec = target.spec
        assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (16, 6, 47)
        assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (2, 1, 8)
        assert spec.eos_ids == (2,)
        assert spec.pad_id == 0
        half = load_target(str(directory), "bfloat16")
        assert half.dtype == torch.bfloat16
        assert half.spec.fingerprint == spec.fingerprint
        other = load_target(str(write_model(tmp_path / "other", seed=5)))
        assert other.spec.fingerprint != spec.fingerprint

    def test_places_that_hold_no_model(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(TargetError, match=r"is no model: it holds no config\.json"):
            load_target(str(tmp_path / "empty"))
        with pytest.raises(TargetError, match="there is no target"):
            load_target(str(tmp_path / "missing.gguf"))
        with pytest.raises(TargetError, match="cannot be loaded as 'int8'"):
            load_target("smollm2", "int8")
        (tmp_path / "empty" / "config.json").write_text("{")
        with pytest.raises(TargetError, match="cannot be loaded"):
            load_target(str(tmp_path / "empty"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("sizes", [(16, 40), (40, 16)])
def test_products_are_the_layers_own(rows, sizes, bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(*sizes, bias=bias)
    x = torch.randn(1, rows, sizes[0])
    with torch.no_grad():
        torch.testing.assert_close(project(x, layer), layer(x), rtol=1e-5, atol=1e-5)


def test_rotary_that_depends_on_the_call_is_left_to_transformers():
    config = config_of("llama")
    model = model_of("llama")
    assert LeanDecoder.of(model.get_decoder(), config) is not None
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert LeanDecoder.of(model.get_decoder(), config) is None
