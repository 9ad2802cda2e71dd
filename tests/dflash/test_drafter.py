from __future__ import annotations

import math

import pytest
import torch

from dflash.attention import attend, attend_blocks
from dflash.drafter import Drafter, RMSNorm
from dflash.errors import ConfigError
from dflash.geometry import block_positions, block_token_ids
from dflash.mask import block_mask

S, B = 20, 4


def inputs(drafter, seed=0, batch=2, count=3, length=S):
    """Embeddings, features, anchors and what belongs to them, all random."""
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    ids = torch.randint(0, config.vocab_size, (batch, length), generator=generator)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    anchors = torch.stack(
        [torch.randperm(length, generator=generator)[:count].sort().values for _ in range(batch)]
    )
    return {
        "ids": ids,
        "embedding": embedding,
        "context": torch.randn(batch, length, config.feature_size, generator=generator),
        "anchors": anchors,
        "keep": torch.ones(batch, count, dtype=torch.bool),
        "lengths": torch.full((batch,), length),
    }


def forward(drafter, case):
    config, length = drafter.config, case["ids"].shape[1]
    tokens = block_token_ids(case["ids"], case["anchors"], config.block_size, config.mask_token_id)
    mask = block_mask(
        drafter.layers[0].backend,
        case["anchors"],
        case["keep"],
        length,
        config.block_size,
        case["lengths"],
    )
    positions = torch.arange(length).expand(case["ids"].shape[0], -1)
    return drafter(
        case["embedding"][tokens],
        case["context"],
        positions,
        block_positions(case["anchors"], config.block_size),
        mask,
    )


def norm_by_hand(x, weight, eps):
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def turn_by_hand(x, position, theta):
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def block_by_hand(drafter, case, b, j):
    """One block of one sequence, one vector at a time; no mask: it sees the list it is given."""
    c, w = drafter.config, {k: v.double() for k, v in drafter.state_dict().items()}
    eps, group = c.rms_norm_eps, c.num_attention_heads // c.num_key_value_heads
    anchor = int(case["anchors"][b, j])
    context = [
        norm_by_hand(w["fc.weight"] @ f.double(), w["hidden_norm.weight"], eps)
        for f in case["context"][b, : min(anchor, int(case["lengths"][b]))]
    ]
    tokens = [int(case["ids"][b, anchor])] + [c.mask_token_id] * (c.block_size - 1)
    xs = [case["embedding"][t].double() for t in tokens]
    for i in range(c.num_hidden_layers):
        p = f"layers.{i}."
        a = p + "self_attn."
        normed = [norm_by_hand(x, w[p + "input_layernorm.weight"], eps) for x in xs]
        sources = [(pos, h) for pos, h in enumerate(context)]
        sources += [(anchor + k, n) for k, n in enumerate(normed)]
        mixed = []
        for k, n in enumerate(normed):
            heads = []
            for h in range(c.num_attention_heads):
                rows = slice(h * c.head_dim, (h + 1) * c.head_dim)
                kv_rows = slice(h // group * c.head_dim, (h // group + 1) * c.head_dim)
                q = norm_by_hand(w[a + "q_proj.weight"][rows] @ n, w[a + "q_norm.weight"], eps)
                q = turn_by_hand(q, anchor + k, c.rope_theta)
                scores, values = [], []
                for position, source in sources:
                    key = w[a + "k_proj.weight"][kv_rows] @ source
                    key = norm_by_hand(key, w[a + "k_norm.weight"], eps)
                    key = turn_by_hand(key, position, c.rope_theta)
                    scores.append(float(q @ key) / math.sqrt(c.head_dim))
                    values.append(w[a + "v_proj.weight"][kv_rows] @ source)
                top = max(scores)
                shares = [math.exp(s - top) for s in scores]
                heads.append(sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares))
            mixed.append(w[a + "o_proj.weight"] @ torch.cat(heads))
        xs = [x + m for x, m in zip(xs, mixed, strict=True)]
        for k, x in enumerate(xs):
            n = norm_by_hand(x, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ n
            inner = gate / (1 + torch.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ n)
            xs[k] = x + w[p + "mlp.down_proj.weight"] @ inner
    return torch.stack([norm_by_hand(x, w["norm.weight"], eps) for x in xs])


@pytest.fixture(params=["sdpa", "blocks"])
def drafter(make_drafter, request):
    built = Drafter(make_drafter().config, backend=request.param)
    built.load_state_dict(make_drafter().state_dict())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # norms that matter
        for parameter in built.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return built


def test_forward_equals_the_loops(drafter):
    case = inputs(drafter)
    case["lengths"] = torch.tensor([S, 9])
    got = forward(drafter, case).unflatten(1, (-1, B))
    for b in range(2):
        for j in range(3):
            want = block_by_hand(drafter, case, b, j).float()
            torch.testing.assert_close(got[b, j], want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_equals_the_others(drafter):
    case = inputs(drafter)
    flexible = Drafter(drafter.config, backend="flex")
    flexible.load_state_dict(drafter.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            forward(flexible, case), forward(drafter, case), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("length", [S, 700])  # 700: more than one tile of the fused CPU kernel
def test_a_block_sees_nothing_else_to_the_last_bit(drafter, length):
    case = inputs(drafter, seed=3, length=length, count=5)
    case["anchors"][0] = torch.tensor([0, 1, 6, 7, length - 1])
    case["lengths"] = torch.tensor([length, length - 3])
    with torch.no_grad():
        before = forward(drafter, case).unflatten(1, (-1, B))
        for b in range(2):
            for j in range(5):
                anchor = int(case["anchors"][b, j])
                other = {k: v.clone() for k, v in case.items()}
                # Everything the block must not see: features from the anchor on and of padding,
                # every token but the anchor's, the other sequence, the other blocks' anchors.
                other["context"][b, min(anchor, int(case["lengths"][b])) :] = 9.0
                other["context"][1 - b] = 9.0
                other["ids"] += 1
                other["ids"] %= drafter.config.vocab_size
                other["ids"][b, anchor] = case["ids"][b, anchor]
                other["anchors"] = (case["anchors"] + 3) % length
                other["anchors"][b, j] = anchor
                after = forward(drafter, other).unflatten(1, (-1, B))
                assert torch.equal(after[b, j], before[b, j]), (b, j)


def test_what_a_block_sees_changes_it(drafter):
    case = inputs(drafter, seed=3)
    case["anchors"][0] = torch.tensor([4, 9, 15])
    with torch.no_grad():
        before = forward(drafter, case).unflatten(1, (-1, B))
        for position in (0, 8):  # the first and the last visible feature of block 1
            other = {k: v.clone() for k, v in case.items()}
            other["context"][0, position] += 1.0
            after = forward(drafter, other).unflatten(1, (-1, B))
            assert (after[0, 1] != before[0, 1]).any(dim=-1).all()
        other = {k: v.clone() for k, v in case.items()}
        other["ids"][0, 9] = (other["ids"][0, 9] + 1) % 37
        after = forward(drafter, other).unflatten(1, (-1, B))
        assert (after[0, 1] != before[0, 1]).any(dim=-1).all()


def test_dummy_blocks_are_finite_and_reach_nobody(drafter):
    case = inputs(drafter, seed=5)
    case["keep"][:, 1] = False
    out = forward(drafter, case).unflatten(1, (-1, B))
    assert out.isfinite().all()
    out[:, [0, 2]].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters())


@pytest.mark.parametrize("chunks", [[1] * 9, [9], [5, 1, 3]])
def test_cached_forward_equals_the_training_forward(drafter, chunks):
    """Context fed piece by piece, a block drafted after each piece, as decoding does."""
    case = inputs(drafter, seed=1, batch=1)
    starts = torch.tensor(chunks).cumsum(0)
    case["anchors"] = starts.unsqueeze(0)
    case["keep"] = torch.ones(1, len(chunks), dtype=torch.bool)
    with torch.no_grad():
        trained = forward(drafter, case).unflatten(1, (-1, B))
        cache = drafter.new_cache(S)
        for j, start in enumerate(starts.tolist()):
            done = cache.length
            tokens = [int(case["ids"][0, start])] + [drafter.config.mask_token_id] * (B - 1)
            decoded = drafter.forward_cached(
                case["embedding"][tokens].unsqueeze(0),
                case["context"][:, done:start],
                torch.arange(done, start).unsqueeze(0),
                torch.arange(start, start + B).unsqueeze(0),
                cache,
            )
            assert cache.length == start
            torch.testing.assert_close(decoded[0], trained[0, j], rtol=1e-5, atol=1e-5)


def test_cache_without_room_is_refused(drafter):
    cache = drafter.new_cache(3)
    embeds, features = torch.zeros(1, B, 16), torch.zeros(1, 4, 32)
    with pytest.raises(ConfigError, match="0 \\+ 4 context positions"):
        drafter.forward_cached(
            embeds, features, torch.arange(4)[None], torch.arange(4, 8)[None], cache
        )


def test_features_of_the_wrong_width_are_refused(drafter):
    with pytest.raises(ConfigError, match="48 wide, but this drafter takes 2 taps of 16"):
        drafter.fuse_context(torch.zeros(1, 3, 48))


def test_names_and_shapes_are_z_labs(drafter):
    names = set(drafter.state_dict())
    assert len(names) == 11 * 2 + 3
    layer = [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj")]
    layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    layer += ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    top = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert names == top | {f"layers.{i}.{n}" for i in range(2) for n in layer}
    assert names == {n for n, _ in drafter.named_parameters()}
    assert drafter.fc.weight.shape == (16, 32)
    assert drafter.layers[0].self_attn.q_norm.weight.shape == (8,)


def test_reset_uses_only_its_generator(make_drafter):
    torch.manual_seed(1)
    first = make_drafter(seed=4)
    torch.manual_seed(2)
    second = make_drafter(seed=4)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def train_step(drafter, case, autocast):
    drafter.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = forward(drafter, case)
    out.float().square().sum().backward()
    return out.detach(), [p.grad.clone() for p in drafter.parameters()]


@pytest.mark.parametrize("backend", ["sdpa", "blocks"])
@pytest.mark.parametrize("autocast", [False, True])
def test_all_layers_and_drafters_share_one_compiled_graph(make_drafter, autocast, backend):
    torch.compiler.reset()
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def build(seed):
        drafter = Drafter(make_drafter(num_hidden_layers=3).config, backend=backend)
        drafter.reset_parameters(torch.Generator().manual_seed(seed))
        return drafter

    for seed in range(2):
        eager, compiled = build(seed), build(seed)
        compiled.compile_layers(backend=counting)
        case = inputs(eager)
        want, want_grads = train_step(eager, case, autocast)
        got, got_grads = train_step(compiled, case, autocast)
        assert torch.equal(got, want)
        for a, b in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            forward(compiled, case)
    assert len(graphs) == 2  # one with gradients, one without
    torch.compiler.reset()


def test_bfloat16_autocast_keeps_float32_masters(drafter):
    case = inputs(drafter)
    exact, exact_grads = train_step(drafter, case, autocast=False)
    case["context"] = case["context"].bfloat16()
    case["embedding"] = case["embedding"].bfloat16()
    rough, rough_grads = train_step(drafter, case, autocast=True)
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.03 * exact.norm()
    for a, b in zip(rough_grads, exact_grads, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.1 * b.norm()


def test_bfloat16_drafter_runs_whole(drafter):
    out = forward(drafter.bfloat16(), inputs(drafter))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_rms_norm_is_computed_in_float32():
    norm = RMSNorm(64, 1e-6)
    # The squares overflow float16 and their sum loses everything in bfloat16.
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert norm(x).dtype == torch.float16
    torch.testing.assert_close(norm(x), torch.ones(1, 64, dtype=torch.float16))


def test_attend_groups_heads_in_order():
    q = torch.zeros(1, 4, 1, 8)
    k = torch.zeros(1, 2, 3, 8)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 3, 8)
    assert attend(q, k, v, None, "sdpa")[0, :, 0, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("autocast", [False, True])
def test_attend_blocks_equals_dense_attention_and_its_gradient(autocast):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 6, 12, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8)]
    draws = [torch.randn(*shape, generator=generator) for shape in shapes]
    seen = torch.rand(2, 3, 9, generator=generator) < 0.5
    seen[0, 0] = False  # a block without any context
    own = torch.block_diag(*[torch.ones(4, 4)] * 3).bool().expand(2, -1, -1)
    dense = torch.cat([seen.repeat_interleave(4, dim=1), own], dim=2).unsqueeze(1)
    results = []
    for blocks in (True, False):
        q, k_ctx, v_ctx, k_blk, v_blk = leaves = [d.clone().requires_grad_() for d in draws]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and blocks):
            if blocks:
                out = attend_blocks(q, (k_ctx, v_ctx), (k_blk, v_blk), seen)
            else:
                keys, values = torch.cat([k_ctx, k_blk], 2), torch.cat([v_ctx, v_blk], 2)
                out = attend(q, keys, values, dense, "sdpa")
        out.sin().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < (3e-2 if autocast else 1e-5) * want.norm()


def test_flex_blocks_of_new_steps_reuse_the_compiled_graph(make_drafter):
    torch.compiler.reset()
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    drafter = Drafter(make_drafter().config, backend="flex")
    drafter.reset_parameters(torch.Generator().manual_seed(0))
    drafter.compile_layers(backend=counting)
    with torch.no_grad():
        for seed in range(3):
            assert forward(drafter, inputs(drafter, seed=seed)).isfinite().all()
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [4, 6])  # groups of 2 and 3
def test_compiled_flex_on_cuda_equals_sdpa_and_leaks_nothing(make_drafter, heads):
    torch.compiler.reset()
    sizes = {"head_dim": 64, "num_attention_heads": heads, "num_key_value_heads": 2}
    drafters = {}
    for backend in ("sdpa", "flex"):
        drafter = Drafter(make_drafter(**sizes).config, backend=backend)
        drafter.reset_parameters(torch.Generator().manual_seed(1))
        drafters[backend] = drafter.cuda()
    drafters["flex"].compile_layers()
    case = {k: v.cuda() for k, v in inputs(drafters["flex"], length=300, count=40).items()}
    outs, grads = {}, {}
    with torch.device("cuda"):
        for backend, drafter in drafters.items():
            outs[backend] = forward(drafter, case)
            outs[backend].square().sum().backward()
            grads[backend] = [p.grad for p in drafter.parameters()]
        torch.testing.assert_close(outs["flex"], outs["sdpa"], rtol=2e-3, atol=2e-3)
        for got, want in zip(grads["flex"], grads["sdpa"], strict=True):
            assert (got - want).norm() < 5e-3 * want.norm()
        anchor = int(case["anchors"][0, 7])
        case["context"][0, anchor:] = 9.0
        with torch.no_grad():
            before = forward(drafters["flex"], case).unflatten(1, (-1, B))[0, 7]
            case["context"][0, anchor:] = -5.0
            after = forward(drafters["flex"], case).unflatten(1, (-1, B))[0, 7]
        assert torch.equal(before, after)
