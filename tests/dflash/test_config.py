from __future__ import annotations

import json
import math
import typing

from dflash.config import PRESETS, RESUMABLE, Config, settings


def test_every_setting_has_a_type_a_default_of_that_type_and_a_text():
    for name, (kind, default, text) in settings().items():
        allowed = typing.get_args(kind)
        assert default in allowed if allowed else type(default) is kind, name
        assert text, name


def test_presets_and_resumable_name_real_settings():
    known = settings()
    for preset in PRESETS.values():
        assert set(preset) <= set(known)
    assert set(known) >= RESUMABLE


def test_the_defaults_are_the_papers():
    config = Config()
    assert (config.drafter.layers, config.drafter.block_size, config.train.anchors) == (5, 16, 512)
    assert (config.optim.lr, config.optim.clip, config.optim.warmup) == (6e-4, 1.0, 0.04)
    assert (config.optim.weight_decay, config.train.epochs) == (0.0, 6.0)
    assert (config.data.max_length, config.loss.ce, config.loss.kl) == (3072, 1.0, 0.0)


def test_plain_values_are_strict_json():
    config = Config()
    infinite = Config(loss=type(config.loss)(gamma=math.inf))
    text = json.dumps(infinite.to_dict(), allow_nan=False)
    assert json.loads(text)["loss"]["gamma"] == "inf"
