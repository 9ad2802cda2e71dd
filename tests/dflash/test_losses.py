from __future__ import annotations

import math

import pytest
import torch

from dflash import losses
from dflash.errors import ConfigError
from dflash.losses import (
    block_labels,
    cross_entropy_sums,
    distillation_sums,
    loss_sums,
    teacher_states,
)

H, V = 6, 19


def labels_by_loops(case, block_size, gamma, cut):
    ids, anchors, keep, loss_mask, lengths, docs = case
    labels, weights = {}, {}
    for b in range(anchors.shape[0]):
        for j in range(anchors.shape[1]):
            a, open_run = int(anchors[b, j]), True
            for k in range(block_size):
                at = a + k
                inside = at < int(lengths[b])
                labelled = inside and bool(loss_mask[b, at])
                if docs is not None and inside:
                    labelled = labelled and int(docs[b, at]) == int(docs[b, a])
                if inside:
                    labels[b, j, k] = int(ids[b, at])
                weight = 0.0
                if k >= 1:
                    open_run = open_run and labelled
                    if keep[b, j] and labelled and (open_run or not cut):
                        weight = math.exp(-(k - 1) / gamma)
                weights[b, j, k] = weight
    return labels, weights


def label_case(seed, with_docs):
    generator = torch.Generator().manual_seed(seed)
    batch, length, count = 3, 15, 4
    docs = None
    if with_docs:
        docs = (torch.rand(batch, length, generator=generator) < 0.2).cumsum(1)
    return (
        torch.randint(0, V, (batch, length), generator=generator),
        torch.randint(0, length, (batch, count), generator=generator),
        torch.rand(batch, count, generator=generator) < 0.8,
        torch.rand(batch, length, generator=generator) < 0.8,
        torch.tensor([length, 9, 2]),
        docs,
    )


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("with_docs", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_labels_and_weights_equal_the_loops(seed, with_docs, cut):
    case = label_case(seed, with_docs)
    *arguments, docs = case
    labels, weights = block_labels(*arguments, 5, 2.5, docs_bS=docs, cut_at_gap=cut)
    want_labels, want_weights = labels_by_loops(case, 5, 2.5, cut)
    for index, want in want_labels.items():
        assert int(labels[index]) == want
    for index, want in want_weights.items():
        assert float(weights[index]) == pytest.approx(want, abs=1e-7)
    assert weights.dtype == torch.float32


def test_labels_are_not_shifted_and_decay_starts_at_slot_one():
    ids = torch.arange(10, 20).unsqueeze(0)
    labels, weights = block_labels(
        ids, torch.tensor([[3]]), torch.tensor([[True]]), torch.ones(1, 10), torch.tensor([10]),
        4, 7.0,
    )  # fmt: skip
    assert labels.tolist() == [[[13, 14, 15, 16]]]
    assert weights[0, 0].tolist() == pytest.approx([0, 1, math.exp(-1 / 7), math.exp(-2 / 7)])


def test_infinite_gamma_is_no_decay_and_zero_is_refused():
    case = label_case(0, False)[:5]
    _, weights = block_labels(*case, 4, math.inf)
    assert set(weights.unique().tolist()) <= {0.0, 1.0}
    with pytest.raises(ConfigError, match="gamma is 0"):
        block_labels(*case, 4, 0.0)


def test_teacher_of_slot_k_sits_one_before_its_token():
    states = torch.arange(8.0).view(1, 8, 1).expand(1, 8, H)
    got = teacher_states(states, torch.tensor([[3, 6]]), 4)
    assert got[0, :, :, 0].tolist() == [[2, 3, 4, 5], [5, 6, 7, 7]]


def loss_case(seed=0, slots=23, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(slots, generator=generator)
    weights[torch.rand(slots, generator=generator) < 0.3] = 0.0
    return {
        "hidden": torch.randn(slots, H, generator=generator),
        "teacher": torch.randn(slots, H, generator=generator),
        "labels": torch.randint(0, V, (slots,), generator=generator),
        "weights": weights,
        "head": torch.randn(V, H, generator=generator).to(dtype),
    }


def softmax_by_loops(row):
    top = max(row)
    parts = [math.exp(x - top) for x in row]
    return [p / sum(parts) for p in parts]


def sums_by_loops(case, kind="kl", heat=1.0, rows=None):
    """(CE, distillation, weight, right) with Python floats, one slot at a time."""
    rows = list(range(V)) if rows is None else rows.tolist()
    head = case["head"].double()[rows]
    ce = distillation = weight = 0.0
    right = []
    for hidden, teacher, label, w in zip(
        case["hidden"], case["teacher"], case["labels"].tolist(), case["weights"].tolist(),
        strict=True,
    ):  # fmt: skip
        logits = (head @ hidden.double()).tolist()
        wanted = (head @ teacher.double()).tolist()
        right.append(w > 0 and rows[logits.index(max(logits))] == label)
        if w > 0:
            ce += w * -math.log(softmax_by_loops(logits)[rows.index(label)])
        q = softmax_by_loops([x / heat for x in logits])
        p = softmax_by_loops([x / heat for x in wanted])
        if kind == "kl":
            terms = [a * math.log(a / b) for a, b in zip(p, q, strict=True)]
            distillation += w * heat**2 * sum(terms)
        else:
            distillation += w * (1 - sum(min(a, b) for a, b in zip(p, q, strict=True)))
        weight += w
    return ce, distillation, weight, right


@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
def test_cross_entropy_equals_the_loops(chunk):
    case = loss_case()
    num, den, correct = cross_entropy_sums(
        case["hidden"], case["labels"], case["weights"], case["head"], chunk=chunk
    )
    ce, _, weight, right = sums_by_loops(case)
    assert float(num) == pytest.approx(ce, rel=1e-5)
    assert float(den) == pytest.approx(weight, rel=1e-6)
    assert correct.tolist() == right


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_distillation_equals_the_loops(kind, heat, chunk):
    case = loss_case(1)
    num, den = distillation_sums(
        case["hidden"], case["teacher"], case["weights"], case["head"],
        kind=kind, temperature=heat, chunk=chunk,
    )  # fmt: skip
    _, distillation, weight, _ = sums_by_loops(case, kind, heat)
    assert float(num) == pytest.approx(distillation, rel=1e-5)
    assert float(den) == pytest.approx(weight, rel=1e-6)


def test_rows_restrict_the_vocabulary():
    case = loss_case(2)
    rows = torch.tensor([18, 3, 4, 7, 11, 0])
    case["labels"] = rows[case["labels"] % 6]
    sums = loss_sums(
        case["hidden"], case["labels"], case["weights"], case["head"],
        teacher_hidden_PH=case["teacher"], distill_weight=1.0, rows=rows,
    )  # fmt: skip
    ce, distillation, _, right = sums_by_loops(case, rows=rows)
    assert float(sums.cross_entropy) == pytest.approx(ce, rel=1e-5)
    assert float(sums.distillation) == pytest.approx(distillation, rel=1e-5)
    assert sums.correct_P.tolist() == right


def test_label_outside_the_rows_is_refused_only_where_it_counts():
    case = loss_case(2)
    case["labels"][:] = 3
    case["weights"][0], case["labels"][0] = 0.0, 9
    rows = torch.tensor([3, 4])
    cross_entropy_sums(case["hidden"], case["labels"], case["weights"], case["head"], rows=rows)
    case["weights"][0] = 1.0
    with pytest.raises(ConfigError, match=r"1 labels are not among the 2 head rows.*token 9"):
        cross_entropy_sums(case["hidden"], case["labels"], case["weights"], case["head"], rows=rows)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("heat", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_gradient_equals_autograd_of_the_plain_formula(kind, heat, chunk):
    case = loss_case(3)
    hidden = case["hidden"].requires_grad_()
    sums = loss_sums(
        hidden, case["labels"], case["weights"], case["head"], teacher_hidden_PH=case["teacher"],
        ce_weight=0.3, distill_weight=0.7, kind=kind, temperature=heat, chunk=chunk,
    )  # fmt: skip
    (sums.numerator * 2.0).backward()
    plain = case["hidden"].detach().double().requires_grad_()
    logits = plain @ case["head"].double().T
    p = (case["teacher"].double() @ case["head"].double().T / heat).softmax(-1)
    q = (logits / heat).softmax(-1)
    ce = torch.nn.functional.cross_entropy(logits, case["labels"], reduction="none")
    kl = (p * (p.log() - q.log())).sum(-1) * heat**2
    tv = 1 - torch.minimum(p, q).sum(-1)
    total = (case["weights"] * (0.3 * ce + 0.7 * (kl if kind == "kl" else tv))).sum()
    (total * 2.0).backward()
    assert sums.numerator.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-4, atol=1e-5)


def test_chunks_and_order_of_drafters_do_not_change_the_mean():
    """Numerators and denominators of two halves, added, give the whole batch's loss."""
    case = loss_case(4)
    whole = loss_sums(case["hidden"], case["labels"], case["weights"], case["head"])
    halves = [
        loss_sums(case["hidden"][p], case["labels"][p], case["weights"][p], case["head"])
        for p in (slice(0, 7), slice(7, None))
    ]
    together = sum(h.numerator for h in halves) / sum(h.denominator for h in halves)
    torch.testing.assert_close(together, whole.numerator / whole.denominator)


def test_no_logits_beyond_a_chunk_and_no_head_gradient(monkeypatch):
    case = loss_case(5, slots=64)
    seen = []
    plain = losses._logits
    monkeypatch.setattr(losses, "_logits", lambda h, w: seen.append(len(h)) or plain(h, w))
    hidden, head = case["hidden"].requires_grad_(), case["head"].requires_grad_()
    cross_entropy_sums(hidden, case["labels"], case["weights"], head, chunk=8)[0].backward()
    assert max(seen) == 8
    # Each counted slot once: backward computes nothing again.
    assert sum(seen) == int((case["weights"] > 0).sum())
    assert head.grad is None
    assert (hidden.grad[case["weights"] == 0] == 0).all()


def test_nothing_supervised_is_a_zero_with_a_zero_gradient():
    case = loss_case(6)
    hidden = case["hidden"].requires_grad_()
    num, den, correct = cross_entropy_sums(
        hidden, case["labels"], torch.zeros_like(case["weights"]), case["head"]
    )
    num.backward()
    assert num.item() == den.item() == 0.0
    assert not correct.any()
    assert (hidden.grad == 0).all()


def test_bfloat16_head_under_autocast_keeps_sums_in_float32():
    case = loss_case(7, slots=200, dtype=torch.bfloat16)
    hidden = case["hidden"].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = loss_sums(
            hidden, case["labels"], case["weights"], case["head"],
            teacher_hidden_PH=case["teacher"], distill_weight=1.0,
        )  # fmt: skip
    rough.numerator.backward()
    assert rough.numerator.dtype == hidden.grad.dtype == torch.float32
    ce, distillation, _, _ = sums_by_loops(case)
    assert float(rough.cross_entropy) == pytest.approx(ce, rel=2e-2)
    assert float(rough.distillation) == pytest.approx(distillation, rel=2e-2)
    # A float32 head is not demoted by the caller's autocast.
    case["head"] = case["head"].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = loss_sums(case["hidden"], case["labels"], case["weights"], case["head"])
    assert exact.numerator.item() == pytest.approx(ce, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"distill_weight": 1.0}, "teacher_hidden_PH"),
        ({"labels_P": None}, "needs labels"),
        ({"kind": "js"}, "'js' is unknown"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_contradictory_arguments(changes, text):
    case = loss_case()
    arguments = {
        "hidden_PH": case["hidden"],
        "labels_P": case["labels"],
        "weights_P": case["weights"],
        "head_VH": case["head"],
    }
    with pytest.raises(ConfigError, match=text):
        loss_sums(**(arguments | changes))
