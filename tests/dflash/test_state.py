from __future__ import annotations

import json

import pytest
import torch

from dflash import state as state_module
from dflash.checkpoint_format import load_drafter
from dflash.config import OptimSettings
from dflash.drafter import Drafter, DrafterConfig
from dflash.errors import CheckpointError
from dflash.replica import Replica
from dflash.run_dir import RunDir
from dflash.state import load_checkpoint, save_checkpoint
from dflash.step import Frozen, LossTerms

CONFIG = DrafterConfig(
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=11,
    num_target_layers=6,
    target_layer_ids=(1, 2),
    block_size=3,
    mask_token_id=10,
)
TERMS = LossTerms(
    num_anchors=3, gamma=4.0, ce=2.0, kl=0.0, temperature=1.0, chunk=None, autocast=False
)


def make(seed=1):
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(torch.Generator().manual_seed(seed))
    weight = torch.zeros(11, 8)
    replica = Replica(drafter, Frozen(weight, weight), TERMS, OptimSettings())
    replica.flat.grads_P.normal_(generator=torch.Generator().manual_seed(seed))
    replica.sums_K[0] = 1.0
    replica.update(1e-2)
    return replica


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", name="x")


def test_a_checkpoint_holds_the_drafter_and_all_that_goes_on(run):
    replica = make()
    path = save_checkpoint(run, replica, schedule="abc", keep=2)
    assert path.name == "step-000001"
    assert run.latest() == (1, path)
    served, config = load_drafter(path)
    assert config == CONFIG
    for mine, other in zip(served.parameters(), replica.drafter.parameters(), strict=True):
        assert torch.equal(mine, other.bfloat16().float())
    other = make(seed=2)
    load_checkpoint(path, other, schedule="abc")
    assert other.completed == 1
    for name, tensor in replica.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name  # float32, not what is served


def test_older_checkpoints_go(run):
    replica = make()
    for _ in range(4):
        save_checkpoint(run, replica, schedule="abc", keep=2)
        replica.update(1e-2)
    names = sorted(entry.name for entry in run.checkpoints.iterdir())
    assert names == ["step-000003", "step-000004"]


@pytest.mark.parametrize("broken", ["save_drafter", "save_file", "write_json"])
def test_a_write_that_fails_leaves_the_last_checkpoint_and_the_next_one_works(
    run, monkeypatch, broken
):
    replica = make()
    first = save_checkpoint(run, replica, schedule="abc", keep=1)
    replica.update(1e-2)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(state_module, broken, fail)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(run, replica, schedule="abc", keep=1)
    assert run.latest() == (1, first)
    load_checkpoint(first, make(seed=3), schedule="abc")
    second = save_checkpoint(run, replica, schedule="abc", keep=1)
    assert [entry.name for entry in run.checkpoints.iterdir()] == [second.name]


def test_another_run_is_refused(run):
    path = save_checkpoint(run, make(), schedule="abc", keep=1)
    with pytest.raises(CheckpointError, match=r"other batches .*schedule abc, here xyz"):
        load_checkpoint(path, make(), schedule="xyz")
    facts = json.loads((path / "train_state.json").read_text())
    (path / "train_state.json").write_text(json.dumps(facts | {"layout": "?"}))
    with pytest.raises(CheckpointError, match="other drafter shape"):
        load_checkpoint(path, make(), schedule="abc")


def test_a_damaged_checkpoint_is_named(run):
    path = save_checkpoint(run, make(), schedule="abc", keep=1)
    (path / "train_state.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match=r"train_state\.safetensors"):
        load_checkpoint(path, make(), schedule="abc")
    (path / "train_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"train_state\.json"):
        load_checkpoint(path, make(), schedule="abc")
