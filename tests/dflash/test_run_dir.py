from __future__ import annotations

import pytest

from dflash.errors import CheckpointError, ConfigError
from dflash.run_dir import (
    RunDir,
    append_line,
    read_json,
    read_lines,
    rewrite_lines,
    write_json,
)


def test_new_runs_get_different_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (RunDir.create(None, name="some/model v1") for _ in range(2))
    assert first.path != second.path
    assert first.path.parent.name == "runs"
    assert "some-model-v1" in first.path.name
    assert first.checkpoints.is_dir()


def test_a_run_is_never_overwritten(tmp_path):
    run = RunDir.create(tmp_path / "run", name="x")
    write_json(run.config, {})
    with pytest.raises(ConfigError, match="already holds a run: --resume"):
        RunDir.create(tmp_path / "run", name="x")
    assert RunDir.open(tmp_path / "run").config == run.config


def test_opening_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunDir.open(tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run directory"):
        RunDir.create(tmp_path / "file" / "run", name="x")


def test_latest_is_the_highest_step_and_ignores_what_was_cut_short(tmp_path):
    run = RunDir.create(tmp_path / "run", name="x")
    assert run.latest() is None
    for name in ("step-000200", "step-1000000", "step-000900", ".writing-step-2000000", "other"):
        (run.checkpoints / name).mkdir()
    assert run.latest() == (1000000, run.checkpoints / "step-1000000")
    assert run.checkpoint(200).name == "step-000200"
    run.keep_newest(2)
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == [
        "other",
        "step-000900",
        "step-1000000",
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_read_json_names_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")


def test_lines_grow_and_a_cut_last_line_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_lines(path) == []
    append_line(path, {"step": 1})
    append_line(path, {"step": 2, "text": "ü\n"})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in read_lines(path)] == [1, 2]
    rewrite_lines(path, read_lines(path)[:1])
    assert path.read_text() == '{"step": 1}\n'


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnope\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl:2 is not valid JSON"):
        read_lines(path)
