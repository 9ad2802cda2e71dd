from __future__ import annotations

import json
import math

import pytest

from dflash.config import PRESETS
from dflash.errors import ConfigError
from dflash.resolve import parse_assignments, read_file, resolve, resume


def test_later_layers_win(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"optim": {"lr": 0.5, "clip": 0.25}, "train": {"seed": 9}}))
    config = resolve(preset="quickstart", file=file, overrides={"optim.clip": "2"})
    assert config.drafter.block_size == PRESETS["quickstart"]["drafter.block_size"]  # preset
    assert (config.optim.lr, config.train.seed) == (0.5, 9)  # file
    assert config.optim.clip == 2.0  # command line
    assert config.optim.beta1 == 0.9  # default


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"preset": "paper", "train": {"steps": 3}, "loss": {"gamma": "inf"}}'),
        ("c.toml", 'preset = "paper"\n[train]\nsteps = 3\n[loss]\ngamma = inf\n'),
        ("c.yaml", "preset: paper\ntrain:\n  steps: 3\nloss: {gamma: .inf}\n"),
    ],
)
def test_three_file_formats_mean_the_same(tmp_path, name, text):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    config = resolve(file=tmp_path / name)
    assert config.train.steps == 3
    assert config.loss.gamma == math.inf
    assert config.drafter.block_size == 16


def test_the_written_configuration_comes_back_equal(tmp_path):
    config = resolve(overrides={"loss.gamma": "inf", "train.seed": 5, "optim.lr": 1e-4})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert resolve(preset="paper", file=tmp_path / "config.json") == config
    assert resume(config.to_dict(), {}) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.rl": "1"}, "unknown setting in command line: optim.rl: did you mean optim.lr?"),
        ({"lr": "1"}, "unknown setting in command line: lr: did you mean optim.lr?"),
        ({"qqqq.zzzz": "1"}, "dflash train --help"),
        ({"train.steps": "many"}, "train.steps is 'many'; it must be a whole number"),
        ({"train.steps": "1.5"}, "train.steps is '1.5'; it must be a whole number"),
        ({"optim.lr": True}, "optim.lr is True; it must be a number"),
        ({"train.dtype": "fp8"}, "train.dtype is 'fp8'; it is one of float32, bfloat16"),
        ({"target.name": 3}, "target.name is 3; it must be text"),
        ({"train.batch": "0"}, "train.batch is 0; it must be at least 1"),
        ({"optim.lr": "nan"}, "optim.lr is nan; it must be at least 0"),
        ({"loss.ce": 0, "loss.kl": 0}, "both 0"),
        ({"optim.warmup": 2}, "optim.warmup is 2.0"),
        ({"optim.beta2": 1}, "optim.beta2 is 1.0"),
        ({"train.epochs": 0, "train.steps": 0}, "train.epochs is 0.0"),
        ({"drafter.block_size": 1}, "drafter.block_size is 1; it must be at least 2"),
    ],
)
def test_a_bad_setting_gives_one_clear_error(overrides, message):
    with pytest.raises(ConfigError) as caught:
        resolve(overrides=overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", "{", "is not valid JSON"),
        ("c.toml", "a = ", "is not valid TOML"),
        ("c.yaml", "a: [", "is not valid YAML"),
        ("c.json", "[1]", "must hold a mapping of sections, not list"),
        ("c.ini", "x", "ends in .json, .toml, .yaml or .yml"),
        ("c.json", '{"optimizer": {}}', "unknown section in"),
        ("c.json", '{"optim": 3}', "section optim in"),
        ("c.json", '{"optim": {"lrr": 3}}', "did you mean optim.lr?"),
        ("c.json", '{"preset": "papr"}', "unknown preset 'papr': known are paper, quickstart"),
    ],
)
def test_a_bad_file_gives_one_clear_error(tmp_path, name, text, message):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(file=tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.json")


def test_assignments():
    assert parse_assignments(["a.b=c=d", "x.y="]) == {"a.b": "c=d", "x.y": ""}
    for bad in ("a.b", "=3"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            parse_assignments([bad])


def test_a_resumed_run_may_change_only_what_cannot_change_its_losses():
    run = resolve(overrides={"train.seed": 4}).to_dict()
    config = resume(run, {"placement.targets": "cpu,cpu", "train.seed": "4"})
    assert (config.placement.targets, config.train.seed) == ("cpu,cpu", 4)
    for name, value in (("optim.lr", "1"), ("placement.drafters", "cpu"), ("train.steps", "9")):
        with pytest.raises(ConfigError, match=f"{name} cannot change in a resumed run"):
            resume(run, {name: value})
