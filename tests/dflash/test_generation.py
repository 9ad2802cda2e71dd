"""`dflash.generate`: the target's own text for every row, whatever its neighbours accept."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from model_dir import WORDS, make_model, make_tokenizer
from test_target import model_of

import dflash
from dflash import generation
from dflash.decode import greedy, speculative
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import GenerationError
from dflash.lean import LeanCache, LeanDecoder
from dflash.prompts import prompt_tokens
from dflash.round import Round
from dflash.rows import DraftRows
from dflash.sampling import Sampling
from dflash.target import Target

PROMPTS = [[5], [7, 8, 9, 10, 3], [2, 30, 11], [12, 4], [1, 1, 6, 20, 33, 8, 3]]


def drafter_of(target, *, seed=0, block_size=4, mask=6):
    spec = target.spec
    config = DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=spec.vocab_size,
        num_target_layers=spec.num_layers,
        target_layer_ids=tuple(target.layer_ids),
        block_size=block_size,
        mask_token_id=mask,
        initializer_range=0.2,
    )
    drafter = Drafter(config)
    drafter.reset_parameters(torch.Generator().manual_seed(seed))
    return drafter


@pytest.fixture(scope="module")
def tiny():
    """A Llama-like target (the lean path) with a tokenizer."""
    return Target("tiny", make_model(seed=3), make_tokenizer(), (1, 3))


@pytest.fixture(scope="module")
def tiny_drafter(tiny):
    return drafter_of(tiny)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "row by row"])
def test_greedy_is_the_targets_own_text(
    tiny, fake_target, make_drafter, lean, batch_size, adaptive
):
    target = tiny if lean else fake_target
    drafter = drafter_of(tiny) if lean else make_drafter()
    found = dflash.generate(
        target, drafter, PROMPTS, max_new_tokens=20, batch_size=batch_size, adaptive=adaptive
    )
    for prompt, completion in zip(PROMPTS, found, strict=True):
        plain = greedy(target, prompt, 20, target.spec.eos_ids)
        assert completion.ids == plain.ids
        assert completion.prompt_tokens == len(prompt)
        assert completion.finish == ("stop_token" if 2 in plain.ids else "length")
        if not adaptive:
            alone = speculative(target, drafter, prompt, 20, target.spec.eos_ids)
            assert completion.accept_lengths == alone.accept_lengths
            assert completion.calls == alone.calls


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_models_of_transformers_own_path_too(kind):
    target = Target(kind, model_of(kind), make_tokenizer(), (1, 3))
    found = dflash.generate(
        target, drafter_of(target), PROMPTS, max_new_tokens=14, batch_size=3, stop_token_ids=()
    )
    plain = dflash.generate(target, None, PROMPTS, max_new_tokens=14, stop_token_ids=())
    for prompt, completion, alone in zip(PROMPTS, found, plain, strict=True):
        assert completion.ids == alone.ids == greedy(target, prompt, 14).ids
        assert alone.accept_lengths == []
        assert alone.calls == 14


@pytest.fixture
def row_1_knows(tiny, monkeypatch):
    """Row 1, of PROMPTS[1], drafts what the target will write; the others draft nothing right."""
    text = greedy(tiny, PROMPTS[1], 24).ids

    def oracle(self, anchors_b, starts_b, uniforms, width, reach):
        block = anchors_b.unsqueeze(1).repeat(1, width)
        at = int(starts_b[1]) - len(PROMPTS[1]) if len(starts_b) > 1 else -1
        if 0 <= at < 24 and text[at] == int(anchors_b[1]):
            block[1, 1:] = torch.tensor((text + [0] * width)[at + 1 : at + width])
        return block, None

    monkeypatch.setattr(Round, "_draft", oracle)


def test_rows_that_accept_differently_move_apart(tiny, tiny_drafter, row_1_knows):
    """Row 1 ends first, and all texts are right."""
    found = dflash.generate(
        tiny, tiny_drafter, PROMPTS[:3], max_new_tokens=24, stop_token_ids=(), adaptive=False
    )
    assert [c.ids for c in found] == [greedy(tiny, p, 24).ids for p in PROMPTS[:3]]
    assert set(found[1].accept_lengths[:-1]) == {4}
    assert found[1].calls < found[0].calls


def test_an_ended_row_of_a_static_batch_stays_inside_the_cache(
    tiny, tiny_drafter, row_1_knows, monkeypatch
):
    """It is computed on with the others, from behind its last block, which may overshoot."""
    monkeypatch.setattr(generation, "compiled_round", lambda work, backend: work.run)
    monkeypatch.setattr(generation, "compiled_length", lambda positions: positions)
    found = dflash.generate(
        tiny,
        tiny_drafter,
        PROMPTS[:2],
        max_new_tokens=7,
        stop_token_ids=(),
        adaptive=False,
        compile=True,
    )
    assert [c.ids for c in found] == [greedy(tiny, p, 7).ids for p in PROMPTS[:2]]
    assert found[1].calls == 3


def test_the_first_of_many_prompts_leaves_its_row_to_the_next(tiny, tiny_drafter):
    found = dflash.generate(
        tiny, tiny_drafter, PROMPTS, max_new_tokens=9, batch_size=2, stop_token_ids=()
    )
    assert [c.ids for c in found] == [greedy(tiny, p, 9).ids for p in PROMPTS]


@pytest.mark.parametrize("limit", [1, 2, 6])
def test_limits(tiny, tiny_drafter, limit):
    for drafter in (None, tiny_drafter):
        found = dflash.generate(
            tiny, drafter, PROMPTS, max_new_tokens=limit, stop_token_ids=(), batch_size=3
        )
        assert [len(c.ids) for c in found] == [limit] * len(PROMPTS)
        assert {c.finish for c in found} == {"length"}


def test_every_token_as_the_stop(tiny, tiny_drafter):
    text = greedy(tiny, PROMPTS[1], 24).ids
    for token in sorted(set(text)):
        (found,) = dflash.generate(
            tiny, tiny_drafter, [PROMPTS[1]], max_new_tokens=24, stop_token_ids=[token]
        )
        assert found.ids == text[: text.index(token) + 1]
        assert (found.finish, found.stop) == ("stop_token", token)


def test_stop_strings_across_tokens_end_where_plain_decoding_ends(tiny, tiny_drafter):
    words = tiny.tokenizer.decode(greedy(tiny, PROMPTS[1], 24).ids, skip_special_tokens=True)
    assert len(words) > 30
    for begin in range(0, len(words) - 7, 5):
        stop = words[begin : begin + 7]  # over two or three words
        for drafter in (None, tiny_drafter):
            (found,) = dflash.generate(
                tiny,
                drafter,
                [PROMPTS[1]],
                max_new_tokens=24,
                stop_token_ids=(),
                stop=["never", stop, "also never"],
            )
            assert (found.finish, found.stop) == ("stop_string", stop)
            assert found.text == words[: words.index(stop)]
            complete = tiny.tokenizer.decode(found.ids, skip_special_tokens=True)
            shorter = tiny.tokenizer.decode(found.ids[:-1], skip_special_tokens=True)
            assert stop in complete
            assert stop not in shorter


def test_prompts_as_text_and_as_messages(tiny, tiny_drafter):
    text = " ".join(WORDS[:3])
    ids = tiny.tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    chat = tiny.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    found = dflash.generate(tiny, tiny_drafter, [text, messages, ids], max_new_tokens=6)
    assert [c.ids for c in found] == [
        greedy(tiny, prompt, 6, tiny.spec.eos_ids).ids for prompt in (ids, chat, ids)
    ]
    assert isinstance(found[0].text, str)


def test_the_template_hears_whether_to_think(tiny, tiny_drafter, monkeypatch):
    template = "{{ 'w1' if enable_thinking else 'w2' }} {{ messages[0]['content'] }}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "w5"}]
    plain, thinking = (
        prompt_tokens(tiny.tokenizer, messages, 0, thinking=thinking) for thinking in (False, True)
    )
    assert plain == tiny.tokenizer("w2 w5")["input_ids"]
    assert thinking == tiny.tokenizer("w1 w5")["input_ids"]


def test_a_prompt_up_to_the_last_position(tiny, tiny_drafter):
    context = tiny.spec.max_position_embeddings
    prompt = [3 + i % 40 for i in range(context - 3)]
    full, short = dflash.generate(
        tiny, tiny_drafter, [prompt, [5, 6]], max_new_tokens=9, stop_token_ids=()
    )
    assert (len(full.ids), full.finish) == (3, "context")
    assert (len(short.ids), short.finish) == (9, "length")
    assert full.ids == greedy(tiny, prompt, 3).ids


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [""]}, "prompt 0 is empty"),
        ({"prompts": [[5] * 128]}, "prompt 0 has 128 tokens and the target 128 positions"),
        ({"prompts": [["w1", "w2"]]}, "prompt 0 is neither a text"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"block_size": 5}, r"block_size is 5; .* 2\.\.4 slots"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"stop": "w1"}, "give a list of texts"),
    ],
)
def test_impossible_requests(tiny, tiny_drafter, options, text):
    arguments = {"prompts": [[1]], "max_new_tokens": 4} | options
    with pytest.raises(GenerationError, match=text):
        dflash.generate(tiny, tiny_drafter, **arguments)


def test_no_tokenizer(fake_target, make_drafter):
    with pytest.raises(GenerationError, match="has no tokenizer"):
        dflash.generate(fake_target, make_drafter(), ["text"], max_new_tokens=3)
    with pytest.raises(GenerationError, match="stop needs text"):
        dflash.generate(fake_target, make_drafter(), [[1]], max_new_tokens=3, stop=["x"])
    (found,) = dflash.generate(fake_target, make_drafter(), [[1]], max_new_tokens=3)
    assert found.text is None
    assert dflash.generate(fake_target, make_drafter(), [], max_new_tokens=3) == []


@pytest.mark.parametrize("adaptive", [False, True])
def test_with_greedy_proposals_a_seed_gives_the_text_it_gives_alone(tiny, tiny_drafter, adaptive):
    options = {"max_new_tokens": 16, "temperature": 0.9, "top_k": 20, "top_p": 0.9}
    for seed in (0, 1):
        alone = dflash.generate(tiny, None, PROMPTS, seed=seed, batch_size=5, **options)
        for batch_size in (1, 3):
            found = dflash.generate(
                tiny,
                tiny_drafter,
                PROMPTS,
                seed=seed,
                batch_size=batch_size,
                adaptive=adaptive,
                **options,
            )
            assert [c.ids for c in found] == [c.ids for c in alone]
    assert len({tuple(c.ids) for c in alone}) == len(PROMPTS)


@pytest.mark.parametrize("proposal", ["greedy", "sampled"])
def test_texts_follow_the_targets_distribution(proposal):
    """Two tokens after one prompt, many times, against the target's exact probabilities."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    vocab, count, prompt = 6, 500, [5, 0, 3]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        initializer_range=0.6,
    )
    target = Target("small", LlamaForCausalLM(config).eval(), None, (0, 1))
    sampling = Sampling(5.0, proposal=proposal)

    def probabilities(ids):
        row = torch.tensor([prompt + ids])
        _, last = target.features(row, torch.tensor([row.shape[1]]), last_hidden=True)
        return sampling.probabilities(target.head(last)[0, -1])

    exact = torch.stack([probabilities([])[a] * probabilities([a]) for a in range(vocab)])
    found = dflash.generate(
        target,
        drafter_of(target, mask=4),
        [prompt] * count,
        max_new_tokens=2,
        temperature=5.0,
        proposal=proposal,
        stop_token_ids=(),
        batch_size=100,
        adaptive=False,
        seed=5,
    )
    texts = Counter(tuple(c.ids) for c in found)
    counts = torch.tensor([[float(texts[a, b]) for b in range(vocab)] for a in range(vocab)])
    expected = exact * count
    assert float(expected.min()) > 2
    square = float(((counts - expected) ** 2 / expected).sum())
    assert square < 66.6  # 99.9 % of a chi-square law with 35 degrees of freedom
    assert len({length for c in found for length in c.accept_lengths}) >= 3


def test_ties_are_counted(tiny, tiny_drafter):
    """A head with every row twice decides every token by a tie."""
    model = make_model(seed=3)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[0:-1:2]
    target = Target("tied", model, make_tokenizer(), (1, 3))
    (found,) = dflash.generate(target, tiny_drafter, [[7, 8]], max_new_tokens=10, stop_token_ids=())
    assert found.ties == [i for i, token in enumerate(found.ids) if token < 46]
    assert len(found.ties) >= 9
    (clear,) = dflash.generate(tiny, tiny_drafter, [[7, 8]], max_new_tokens=10)
    assert clear.ties == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_compiled_round_writes_the_same_and_is_one_graph(tiny, tiny_drafter, temperature):
    from torch._dynamo.utils import counters

    options = {"max_new_tokens": 12, "temperature": temperature, "stop_token_ids": ()}
    plain = dflash.generate(tiny, tiny_drafter, PROMPTS, batch_size=3, **options)
    torch._dynamo.reset()
    counters.clear()
    for drafter in (tiny_drafter, drafter_of(tiny, seed=9)):
        compiled = dflash.generate(
            tiny, drafter, PROMPTS, batch_size=3, compile="eager", adaptive=False, **options
        )
        assert [c.ids for c in compiled] == [c.ids for c in plain]
    assert counters["stats"]["unique_graphs"] == 1  # for the second call and drafter too
    assert not counters["graph_break"]


def test_caches_are_allocated_once(tiny, tiny_drafter, monkeypatch):
    """As many zeros as there are layers, whatever the number of prompts and rounds."""
    first, last = (greedy(tiny, prompt, 12).ids for prompt in (PROMPTS[0], PROMPTS[2]))
    stops = [token for token in first if token not in last][:1]  # row 0 ends before row 2
    made = []
    for owner, name in ((LeanDecoder, "new_cache"), (DraftRows, "__init__")):
        plain = getattr(owner, name)

        def counting(*args, plain=plain, name=name):
            made.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, counting)
    moved = []
    plain_move = LeanCache.move

    def moving(cache, source, row):
        before = [t.data_ptr() for t in (*cache.keys, *cache.values)]
        plain_move(cache, source, row)
        moved.append(before == [t.data_ptr() for t in (*cache.keys, *cache.values)])

    monkeypatch.setattr(LeanCache, "move", moving)
    monkeypatch.setattr(LeanCache, "grow", None)
    monkeypatch.setattr(LeanCache, "select", None)
    dflash.generate(
        tiny, tiny_drafter, PROMPTS[:3], max_new_tokens=12, batch_size=3, stop_token_ids=stops
    )
    assert made == ["new_cache", "__init__"]
    assert moved
    assert all(moved)


def test_the_host_reads_one_tensor_a_round(tiny, tiny_drafter, monkeypatch):
    """Behind the prompts: one `tolist` for each round, and no other read of a value."""
    reads = []
    for name in ("tolist", "item", "__int__", "__bool__", "__index__", "__float__"):
        plain = getattr(torch.Tensor, name)

        def counting(tensor, *args, plain=plain, name=name):
            reads.append(name)
            return plain(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counting)
    for limit in (5, 9):
        reads.clear()
        found = dflash.generate(
            tiny, tiny_drafter, PROMPTS[:3], max_new_tokens=limit, stop_token_ids=(), batch_size=3
        )
        first = [reads.pop(0) for _ in range(reads.index("tolist"))]
        assert set(first) <= {"__int__", "__bool__"}
        assert set(reads) == {"tolist"}
        assert len(reads) == max(c.calls for c in found) - 1


def test_names_of_the_package():
    assert set(dflash.__all__) == {"Completion", "__version__", "generate"}
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        _ = dflash.generat
