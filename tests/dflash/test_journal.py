from __future__ import annotations

import math

import pytest

from dflash.journal import Journal
from dflash.loop import Waits
from dflash.replica import StepResult
from dflash.run_dir import RunDir, append_line, read_lines


def result(loss, **changes):
    fields = {
        "loss": loss,
        "ce": loss,
        "kl": 0.0,
        "accuracy": (0.5, 0.25, math.nan),
        "acceptance": 1.5,
        "blocks": 8,
        "tokens": 100,
        "dropped": 0,
        "grad_norm": 0.1,
    } | changes
    return StepResult(**fields)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", name="x")


def make(run, **changes):
    lines, saved = [], []
    settings = {"steps": 10, "first": 0, "log_every": 2, "checkpoint_every": 4} | changes
    journal = Journal(
        run, checkpoint=lambda: saved.append(journal._step), write=lines.append, **settings
    )
    journal.begin()
    return journal, lines, saved


def test_every_step_is_kept_and_every_second_one_is_said(run):
    journal, lines, saved = make(run)
    for step in range(10):
        journal.on_step(1e-3, result(float(step)), Waits(step * 1.0, step * 2.0, 0.0))
    records = read_lines(run.metrics)
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["loss"] for record in records] == [float(i) for i in range(10)]
    assert records[3]["wait_targets"] == 1.0
    assert records[3]["wait_drafters"] == 2.0
    assert records[0]["accuracy"] == [0.5, 0.25, None]
    assert len(lines) == 5
    assert lines[1].startswith("step  4/10  loss 2.5000  right 50 25 nan %  accept 1.500")
    assert "targets 2.0 s drafters 4.0 s exchange 0.0 s" in lines[1]
    assert saved == [4, 8, 10]


def test_a_resumed_run_forgets_what_happened_behind_its_checkpoint(run):
    for step in range(1, 8):
        append_line(run.metrics, {"step": step})
    journal, lines, _ = make(run, first=4, log_every=5)
    journal.on_step(1e-3, result(3.0), Waits(0.0, 0.0, 0.0))
    assert [record["step"] for record in read_lines(run.metrics)] == [1, 2, 3, 4, 5]
    assert lines[0].startswith("step  5/10  loss 3.0000")


def test_lost_sequences_are_said(run):
    journal, lines, _ = make(run, log_every=1)
    journal.on_step(1e-3, result(1.0, dropped=3, acceptance=math.nan), Waits(0.0, 0.0, 0.0))
    assert lines[0].endswith("3 not finite")
    assert read_lines(run.metrics)[0]["acceptance"] is None
