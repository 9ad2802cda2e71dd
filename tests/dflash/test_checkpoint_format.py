from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash import checkpoint_format, weights
from dflash.checkpoint_format import check_target, load_drafter, save_drafter
from dflash.errors import CheckpointError


@pytest.fixture
def saved(tmp_path, make_drafter):
    drafter = make_drafter(seed=3)
    place = tmp_path / "runs" / "drafter"
    save_drafter(drafter, place, {"trained_on": {"target": "fake"}}, dtype=torch.float32)
    return drafter, place


def test_round_trip_is_exact_and_trainable(saved):
    drafter, place = saved
    loaded, config = load_drafter(place)
    assert config == drafter.config
    for (name, a), (_, b) in zip(
        drafter.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert b.requires_grad
        assert b.device.type == "cpu"
    positions = torch.arange(5).unsqueeze(0)
    for a, b in zip(drafter.rope(positions), loaded.rope(positions), strict=True):
        assert torch.equal(a, b)
    extra = json.loads((place / "config.json").read_text())["trained_on"]
    assert extra == {"target": "fake"}
    assert sorted(p.name for p in place.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in place.parent.iterdir()] == ["drafter"]


def test_default_is_bfloat16_on_disk(tmp_path, make_drafter):
    drafter = make_drafter()
    save_drafter(drafter, tmp_path / "d")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    assert set(stored) == set(drafter.state_dict())
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_drafter(tmp_path / "d")[0].fc.weight.dtype == torch.float32
    assert load_drafter(tmp_path / "d", dtype=None)[0].fc.weight.dtype == torch.bfloat16


def test_saving_again_replaces_and_keeps_other_files(saved, make_drafter):
    _, place = saved
    (place / "state.pt").write_bytes(b"x")
    newer = make_drafter(seed=9)
    save_drafter(newer, place, dtype=torch.float32)
    assert torch.equal(load_drafter(place)[0].fc.weight, newer.fc.weight)
    assert sorted(p.name for p in place.iterdir()) == [
        "config.json",
        "model.safetensors",
        "state.pt",
    ]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_failed_write_leaves_what_was_there(saved, make_drafter, monkeypatch, tmp_path, fresh):
    drafter, place = saved
    where = tmp_path / "new" if fresh else place

    def half(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(weights, "save_file", half)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_drafter(make_drafter(seed=9), where)
    monkeypatch.undo()
    assert not (tmp_path / "new").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert torch.equal(load_drafter(place)[0].fc.weight, drafter.fc.weight)
    assert len(list(place.iterdir())) == 2


def test_every_file_is_flushed_before_it_is_renamed(tmp_path, make_drafter, monkeypatch):
    events = []
    for module in (checkpoint_format, weights):
        monkeypatch.setattr(module, "flush", lambda p: events.append(("flush", p.name)))
    plain = type(tmp_path).replace

    def replace(path, target):
        events.append(("rename", path.name))
        return plain(path, target)

    monkeypatch.setattr(type(tmp_path), "replace", replace)
    save_drafter(make_drafter(), tmp_path)
    for i, (what, name) in enumerate(events):
        if what == "rename":
            assert events[i - 1] == ("flush", name)
    assert events[-1] == ("flush", tmp_path.name)


def test_extra_must_not_hide_the_format(tmp_path, make_drafter):
    with pytest.raises(CheckpointError, match="overwrite block_size"):
        save_drafter(make_drafter(), tmp_path / "d", {"block_size": 3})


def rewrite(place, change):
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: (p / "config.json").unlink(), "config.json is missing"),
        (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda p: (p / "config.json").write_text("[]"), "holds list"),
        (lambda p: (p / "config.json").write_text("{}"), "lacks 'num_target_layers'"),
        (lambda p: (p / "model.safetensors").write_bytes(b"12"), "safetensors cannot be read"),
        (
            lambda p: rewrite(p, lambda t: t.update({"context_proj.weight": t.pop("fc.weight")})),
            r"fc.weight is missing; was it renamed to context_proj.weight\?",
        ),
        (
            lambda p: rewrite(p, lambda t: t.update({"fc.weight": t["fc.weight"][:, :16].clone()})),
            r"fc.weight has shape \(16, 16\), the config asks for \(16, 32\)",
        ),
    ],
)
def test_damage_is_named(saved, damage, text):
    _, place = saved
    damage(place)
    with pytest.raises(CheckpointError, match=text) as caught:
        load_drafter(place)
    assert str(place) in str(caught.value)


def test_drafter_of_another_target_names_both(saved, fake_target):
    from dataclasses import replace

    drafter, place = saved
    load_drafter(place, target=fake_target.spec)
    other = replace(fake_target.spec, name="big", hidden_size=64, num_layers=30)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(place, target=other)
    for part in (str(place), "'big'", "hidden size 16, not 64", "layers 4, not 30"):
        assert part in str(caught.value)
    with pytest.raises(CheckpointError, match="vocabulary 37, not 38"):
        check_target(drafter.config, replace(fake_target.spec, vocab_size=38), where="here")


def test_transformers_reads_the_config(saved):
    """z-lab's loader and the servers read it as a Qwen3 config."""
    transformers = pytest.importorskip("transformers")
    drafter, place = saved
    config = transformers.AutoConfig.from_pretrained(place)
    assert config.model_type == "qwen3"
    assert config.hidden_size == drafter.config.hidden_size
    assert config.block_size == 4
    assert config.dflash_config["mask_token_id"] == 36
