from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflash import cli
from dflash.config import settings
from dflash.errors import ConfigError, DataError, WorkerFailed


@pytest.fixture
def calls(monkeypatch):
    """Replace the training by a record of what it was called with."""
    import dflash.train

    seen = []

    def fake(config, *, run_path, resume_path):
        seen.append((config, run_path, resume_path))
        return 0

    monkeypatch.setattr(dflash.train, "train", fake)
    return seen


def test_no_arguments_is_the_quickstart(calls):
    assert cli.main(["train"]) == 0
    config, run_path, resume_path = calls[0]
    assert (config.target.name, config.data.source) == ("smollm2", "humaneval")
    assert config.drafter.init == "target"
    assert run_path is None
    assert resume_path is None


def test_flags_and_settings_reach_the_configuration(calls, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"optim": {"lr": 0.5, "clip": 3}}))
    code = cli.main(
        f"train --config {file} --preset paper --run here --steps 7 optim.lr=0.25 "
        "--targets cpu,cpu loss.kl=1".split()
    )
    assert code == 0
    config, run_path, _ = calls[0]
    assert (config.optim.lr, config.optim.clip, config.train.steps) == (0.25, 3.0, 7)
    assert (config.placement.targets, config.loss.kl) == ("cpu,cpu", 1.0)
    assert config.drafter.block_size == 16
    assert str(run_path) == "here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--stepz", "3"], "unknown flag: --stepz: did you mean --steps?"),
        (["train", "--drafter=cpu"], "did you mean --drafters?"),
        (["train", "optim.lrr=3"], "did you mean optim.lr?"),
        (["train", "chats.jsonl"], "'chats.jsonl' is not section.key=value"),
        (["train", "--steps", "many"], "train.steps is 'many'"),
        (["train", "--steps"], "expected one argument"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--resume", "x", "--preset", "paper"], "--resume takes its settings"),
        (["train", "--resume", "nowhere"], "nowhere holds no run to resume"),
        (["train", "--config", "nowhere.json"], "cannot read the configuration nowhere.json"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(calls, capsys, arguments, message):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("dflash: ")
    assert err.count("\n") == 1
    assert calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad setting"), 2),
        (DataError("not a conversation", "chats.jsonl", 4), 1),
        (WorkerFailed("target-0", ValueError("x")), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code):
    import dflash.train

    def fail(config, **paths):
        raise error

    monkeypatch.setattr(dflash.train, "train", fail)
    assert cli.main(["train"]) == code
    err = capsys.readouterr().err
    assert (str(error) or "interrupted") in err
    assert "Traceback" not in err


def test_show_config_prints_what_a_file_accepts(capsys, calls, tmp_path):
    assert cli.main(["train", "--show-config", "train.seed=5", "loss.gamma=inf"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "c.json").write_text(shown)
    assert cli.main(["train", "--config", str(tmp_path / "c.json"), "--preset", "paper"]) == 0
    assert calls[0][0].to_dict() == json.loads(shown)
    assert calls[0][0].train.seed == 5


def test_resume_reads_the_run(calls, tmp_path, capsys):
    cli.main(["train", "--show-config", "train.seed=5"])
    (tmp_path / "config.json").write_text(capsys.readouterr().out)
    assert cli.main(["train", "--resume", str(tmp_path), "--targets", "cpu,cpu"]) == 0
    config, _, resume_path = calls[0]
    assert (config.train.seed, config.placement.targets) == (5, "cpu,cpu")
    assert resume_path == tmp_path
    assert cli.main(["train", "--resume", str(tmp_path), "--seed", "6"]) == 2
    assert "train.seed cannot change in a resumed run" in capsys.readouterr().err


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for name in settings():
        assert f"{name} = " in out
    assert "dflash train --resume" in out


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_a_wrong_flag_is_told_without_loading_torch():
    code = (
        "import sys; from dflash.cli import main; code = main(['train', '--nope']);"
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2
