from __future__ import annotations

import pytest
import torch

from dflash.anchors import sample_anchors
from dflash.decode import greedy, speculative
from dflash.errors import GenerationError
from dflash.geometry import block_positions, block_token_ids
from dflash.losses import block_labels, cross_entropy_sums
from dflash.mask import block_mask_dense

PROMPTS = [[5], [7, 8, 9, 10, 3], [2, 30, 11]]


def greedy_by_hand(target, prompt, limit, stops=()):
    """The whole sequence again for every token, no cache."""
    ids = list(prompt)
    for _ in range(limit):
        _, last = target.features(torch.tensor([ids]), torch.tensor([len(ids)]), last_hidden=True)
        ids.append(int(target.head(last)[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def train_hidden(target, drafter, ids, anchors):
    """The training forward of one sequence: hidden states [N, B, H] of the blocks."""
    config, row = drafter.config, torch.tensor([ids])
    lengths = torch.tensor([len(ids)])
    anchors = torch.as_tensor(anchors).unsqueeze(0)
    context, _ = target.features(row, lengths, last_hidden=False)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    tokens = block_token_ids(row, anchors, config.block_size, config.mask_token_id)
    hidden = drafter(
        target.embed(tokens),
        context,
        torch.arange(len(ids)).unsqueeze(0),
        block_positions(anchors, config.block_size),
        block_mask_dense(anchors, keep, len(ids), config.block_size, lengths),
    )
    return hidden[0].unflatten(0, (-1, config.block_size))


def overfit(target, drafter, ids, prompt_len, steps=150):
    """Train on one sequence, all its anchors, until it is known by heart."""
    config, row = drafter.config, torch.tensor([ids])
    lengths = torch.tensor([len(ids)])
    loss_mask = torch.arange(len(ids)).unsqueeze(0) >= prompt_len
    anchors, keep = sample_anchors(
        loss_mask, len(ids), torch.Generator().manual_seed(0), lengths=lengths
    )
    labels, weights = block_labels(
        row, anchors, keep, loss_mask, lengths, config.block_size, gamma=8.0
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        hidden = train_hidden(target, drafter, ids, anchors[0])
        num, den, _ = cross_entropy_sums(
            hidden.flatten(0, 1), labels.flatten(), weights.flatten(), target.head_weight
        )
        losses.append((num / den).item())
        optimizer.zero_grad()
        (num / den).backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_the_sequence_run_again_and_again(fake_target, prompt):
    out = greedy(fake_target, prompt, 12)
    assert out.ids == greedy_by_hand(fake_target, prompt, 12)
    assert out.calls == fake_target.steps == 12
    assert out.accept_lengths == []
    assert 0 < out.prefill_seconds <= out.seconds


@pytest.mark.parametrize("block_size", [None, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_speculative_writes_what_greedy_writes(make_target, make_drafter, seed, block_size):
    target, drafter = make_target(seed=seed), make_drafter(seed=seed)
    for prompt in PROMPTS:
        for limit in (1, 2, 7, 21):
            plain = greedy(target, prompt, limit)
            fast = speculative(target, drafter, prompt, limit, block_size=block_size)
            assert fast.ids == plain.ids
            assert fast.calls == 1 + len(fast.accept_lengths)
            assert 1 + sum(fast.accept_lengths) >= limit
            assert all(1 <= n <= (block_size or 4) for n in fast.accept_lengths)


@pytest.mark.parametrize("knows", [False, True], ids=["untrained", "overfit"])
def test_stop_ids_cut_exactly_as_in_greedy(make_target, make_drafter, knows):
    """Every token of the text as the stop: at a block's start, inside it, as its bonus."""
    target, drafter = make_target(seed=1), make_drafter()
    prompt = PROMPTS[1]
    text = greedy(target, prompt, 24).ids
    if knows:
        overfit(target, drafter, prompt + text, len(prompt))
    for stop in sorted(set(text)):
        plain = greedy(target, prompt, 24, {stop})
        assert plain.ids == greedy_by_hand(target, prompt, 24, {stop})
        assert plain.ids[-1] == stop
        assert stop not in plain.ids[:-1]
        assert speculative(target, drafter, prompt, 24, {stop}).ids == plain.ids


def test_overfit_drafter_reaches_the_block_size(make_target, make_drafter):
    target, drafter = make_target(seed=3), make_drafter()
    size = drafter.config.block_size
    prompt = PROMPTS[1]
    ids = prompt + greedy(target, prompt, 1 + 6 * size + size).ids
    losses = overfit(target, drafter, ids, len(prompt))
    assert losses[0] > 2.0
    assert losses[-1] < 0.01
    out = speculative(target, drafter, prompt, 1 + 6 * size)
    assert out.ids == greedy(target, prompt, 1 + 6 * size).ids
    assert out.accept_lengths == [size] * 6
    assert out.calls == 7


@pytest.mark.parametrize("trained", [False, True])
def test_decode_blocks_equal_training_blocks(make_target, make_drafter, trained):
    """Every block drafted while decoding, against the training forward at the same anchor."""
    target, drafter = make_target(seed=2), make_drafter(seed=2)
    prompt = PROMPTS[1]
    text = greedy(target, prompt, 30).ids
    if trained:
        # Half trained, so that acceptance is mixed and contexts of all lengths are fed.
        overfit(target, drafter, prompt + text, len(prompt), steps=25)
    drafted = []
    plain = drafter.forward_cached

    def recording(embeds, context, context_positions, block_positions, cache):
        hidden = plain(embeds, context, context_positions, block_positions, cache)
        drafted.append((int(block_positions[0, 0]), cache.length, hidden[0]))
        return hidden

    drafter.forward_cached = recording
    out = speculative(target, drafter, prompt, 24)
    if trained:
        assert len(set(out.accept_lengths)) >= 3
    starts = [start for start, _, _ in drafted]
    assert starts == [len(prompt) + sum(out.accept_lengths[:i]) for i in range(len(drafted))]
    assert [length for _, length, _ in drafted] == starts
    with torch.no_grad():
        wanted = train_hidden(target, drafter, prompt + text, starts)
    for (_, _, hidden), want in zip(drafted, wanted, strict=True):
        torch.testing.assert_close(
            target.head(hidden), target.head(want), rtol=1e-5, atol=1e-5 * float(want.abs().max())
        )


def test_features_of_rejected_tokens_are_never_fed(make_target, make_drafter):
    target, drafter = make_target(seed=4), make_drafter(seed=5)
    fed = []
    plain = drafter.forward_cached

    def recording(embeds, context, context_positions, block_positions, cache):
        fed.append((context_positions[0].tolist(), context[0]))
        return plain(embeds, context, context_positions, block_positions, cache)

    drafter.forward_cached = recording
    prompt = PROMPTS[2]
    out = speculative(target, drafter, prompt, 15)
    row = torch.tensor([prompt + out.ids])
    whole, _ = target.features(row, torch.tensor([row.shape[1]]), last_hidden=False)
    assert [p for positions, _ in fed for p in positions] == list(
        range(sum(len(positions) for positions, _ in fed))
    )
    for positions, context in fed:
        torch.testing.assert_close(context, whole[0, positions], rtol=1e-4, atol=1e-4)


def test_a_genuine_mask_token_in_the_text_is_kept(make_target, make_drafter):
    target = make_target(seed=1)
    text = greedy(target, PROMPTS[1], 16).ids
    drafter = make_drafter(mask_token_id=text[5])
    assert speculative(target, drafter, PROMPTS[1], 16).ids == text


@pytest.mark.parametrize(
    ("prompt", "limit", "block_size", "text"),
    [
        ([], 4, None, "prompt is empty"),
        ([1], 0, None, "max_new_tokens is 0"),
        ([1], 4, 5, r"block_size is 5; .* 2\.\.4 slots"),
        ([1], 4, 1, "block_size is 1"),
    ],
)
def test_impossible_requests(fake_target, make_drafter, prompt, limit, block_size, text):
    with pytest.raises(GenerationError, match=text):
        speculative(fake_target, make_drafter(), prompt, limit, block_size=block_size)
    if block_size is None:
        with pytest.raises(GenerationError, match=text):
            greedy(fake_target, prompt, limit)


def test_drafter_of_other_taps_is_refused(make_target, make_drafter):
    with pytest.raises(GenerationError, match=r"taps layers \(1, 3\).*trained on \(0, 2\)"):
        speculative(make_target((1, 3)), make_drafter(), [1], 4)
