"""Drafters that were trained wrongly are told by what they predict.

Tiny drafters learn the answers of a tiny target by heart: with labels as DFlash has them, with
labels shifted by one, or from taps one layer off.
"""

from __future__ import annotations

import pytest
import torch
from format_files import fitting_drafter
from model_dir import make_model, make_tokenizer

from dflash import agreement
from dflash.agreement import Agreement, measure_agreement
from dflash.checkpoint_format import save_drafter
from dflash.decode import greedy
from dflash.geometry import block_positions, block_token_ids
from dflash.inspection import inspect_checkpoint
from dflash.mask import block_mask
from dflash.target import Target

TOKENS = 40


@pytest.fixture(scope="module")
def target():
    return Target("tiny", make_model(seed=1), make_tokenizer())  # its text repeats little


@pytest.fixture(autouse=True)
def one_question(monkeypatch):
    """One answer is learned by heart sooner than three."""
    monkeypatch.setattr(agreement, "_PROMPTS", agreement._PROMPTS[:1])


def learn(target, *, shift=0, taps=(1, 2, 3), steps=100):
    """A drafter whose slot k has learned token a + k + shift from the given layers."""
    drafter = fitting_drafter()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    prompt_ids = agreement._prompt_ids(target, agreement._PROMPTS[0])
    answer = greedy(target, prompt_ids, TOKENS, target.spec.eos_ids).ids
    ids = torch.tensor([[*prompt_ids, *answer]])
    length = ids.shape[1]
    anchors = torch.arange(len(prompt_ids), length - 4).unsqueeze(0)
    context, _ = target.with_taps(taps).features(ids, torch.tensor([length]), last_hidden=False)
    keep = torch.ones_like(anchors, dtype=torch.bool)
    inputs = (
        target.embed(block_token_ids(ids, anchors, 4, drafter.config.mask_token_id)),
        context,
        torch.arange(length).unsqueeze(0),
        block_positions(anchors, 4),
        block_mask("sdpa", anchors, keep, length, 4, torch.tensor([length])),
    )
    labels = ids[0][anchors[0].unsqueeze(1) + torch.arange(4) + shift].flatten()
    for _ in range(steps):
        logits = drafter(*inputs)[0] @ target.head_weight.T
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def test_a_sound_drafter_is_read_best_as_it_is(target):
    found = measure_agreement(target, learn(target), TOKENS)
    assert found.plain > 0.8
    assert not found.shifted_fits_better
    assert found.better_offsets == []
    assert set(found.taps) == {-1, 1}
    assert f"{found.plain:.0%} of {found.count} drafted tokens" in str(found)


@pytest.mark.parametrize(
    ("training", "kind", "text"),
    [
        ({"shift": 1}, "shifted-labels", "the labels were shifted by one"),
        ({"taps": (2, 3, 4)}, "layer-ids", "with every tap moved by +1"),
        ({"taps": (0, 1, 2)}, "layer-ids", "with every tap moved by -1"),
    ],
)
def test_a_wrongly_trained_one_is_told_though_its_files_are_sound(
    target, tmp_path, training, kind, text
):
    save_drafter(learn(target, **training), tmp_path / "drafter", dtype=torch.float32)
    assert inspect_checkpoint(tmp_path / "drafter", target).findings == []
    found = inspect_checkpoint(tmp_path / "drafter", target, probe_tokens=TOKENS)
    assert [f.kind for f in found.findings] == [kind]
    assert text in found.findings[0].text


def test_an_untrained_drafter_is_no_finding(target):
    found = measure_agreement(target, fitting_drafter(), TOKENS)
    assert found.plain < 0.3
    assert not found.shifted_fits_better
    assert found.better_offsets == []


def test_taps_at_the_ends_are_moved_inwards_only(target):
    lowest = measure_agreement(target, fitting_drafter(target_layer_ids=(0, 2, 3)), 8)
    highest = measure_agreement(target, fitting_drafter(target_layer_ids=(1, 2, 5)), 8)
    assert (set(lowest.taps), set(highest.taps)) == ({1}, {-1})


def test_an_answer_too_short_to_draft_in_says_nothing(target):
    found = measure_agreement(target, fitting_drafter(), 1)
    assert (found.count, found.plain) == (0, 0.0)
    assert not found.shifted_fits_better


@pytest.mark.parametrize(
    ("plain", "shifted", "count", "better"),
    [
        (0.40, 0.80, 200, True),
        (0.40, 0.58, 200, False),  # less than half as many again
        (0.02, 0.08, 200, False),  # three times as many, and within the noise
        (0.02, 0.08, 20000, True),
        (0.00, 1.00, 4, False),  # four tokens say nothing
    ],
)
def test_better_means_clearly_better(plain, shifted, count, better):
    assert Agreement(count, plain, shifted, {}).shifted_fits_better is better


def test_a_target_without_a_chat_template_continues_the_text():
    plain = Target("base", make_model(), make_tokenizer(template=None))
    found = measure_agreement(plain, fitting_drafter(), 8)
    assert found.count > 0
