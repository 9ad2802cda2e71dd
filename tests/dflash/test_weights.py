"""Weights in one file or several: what is written is read, and a broken set is named."""

from __future__ import annotations

import json

import pytest
import torch

from dflash.errors import CheckpointError
from dflash.weights import INDEX_NAME, StoredWeights, write_weights

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),  # 24 bytes
    "b": torch.arange(4, dtype=torch.bfloat16),  # 8
    "c": torch.arange(100.0),  # 400: larger than a shard
    "d": torch.arange(2),  # 16
}


@pytest.fixture
def sharded(tmp_path):
    write_weights(tmp_path, TENSORS, max_bytes=40)
    return tmp_path


def test_shards_hold_at_most_the_bound_and_come_back(sharded):
    files = sorted(p.name for p in sharded.iterdir())
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX_NAME]
    index = json.loads((sharded / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 24 + 8 + 400 + 16
    assert [index["weight_map"][n][6:11] for n in "abcd"] == ["00001", "00001", "00002", "00003"]
    weights = StoredWeights.open(sharded)
    assert weights.path.name == INDEX_NAME
    found = dict(weights.items())
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert torch.equal(weights.load(name), tensor)


@pytest.mark.parametrize("bound", [None, 448])
def test_what_fits_is_one_file(tmp_path, bound):
    write_weights(tmp_path, TENSORS, max_bytes=bound)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(StoredWeights.open(tmp_path).files) == set(TENSORS)


def change_index(place, change):
    index = json.loads((place / INDEX_NAME).read_text())
    change(index)
    (place / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda p: (p / "model-00002-of-00003.safetensors").unlink(),
            "00002-of-00003.* is missing",
        ),
        (lambda p: (p / INDEX_NAME).write_text("{}"), "no index of weights: KeyError"),
        (lambda p: (p / INDEX_NAME).write_text("{"), "no index of weights"),
        (
            lambda p: change_index(p, lambda i: i["weight_map"].pop("b")),
            "disagree about 1 tensors: b is only in model-00001",
        ),
        (
            lambda p: change_index(
                p, lambda i: i["weight_map"].update(x="model-00001-of-00003.safetensors")
            ),
            "x is only in the index",
        ),
        (
            lambda p: change_index(p, lambda i: i["weight_map"].update(a="../a.safetensors")),
            "outside its directory",
        ),
        (
            lambda p: (p / "model-00003-of-00003.safetensors").write_bytes(b"\xff" * 9),
            "00003.safetensors cannot be read",
        ),
    ],
)
def test_a_broken_set_is_named(sharded, damage, text):
    damage(sharded)
    with pytest.raises(CheckpointError, match=text):
        StoredWeights.open(sharded)


def test_a_failed_write_leaves_no_half_file(tmp_path, monkeypatch):
    from dflash import weights

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "full")

    monkeypatch.setattr(weights, "save_file", half)
    with pytest.raises(OSError, match="full"):
        write_weights(tmp_path, TENSORS)
    assert list(tmp_path.iterdir()) == []
