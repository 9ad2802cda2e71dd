"""A sound drafter in every layout has no findings; each way to break one is found, by its kind."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from format_files import (
    edit_config,
    edit_tensors,
    fitting_config,
    fitting_drafter,
    read_config,
    to_torchspec,
)
from model_dir import write_model

from dflash import cli
from dflash.checkpoint_format import read_checkpoint, save_drafter
from dflash.config_checks import check_layer_ids
from dflash.errors import CheckpointError
from dflash.export import Verifier, export_drafter
from dflash.inspection import inspect_checkpoint
from dflash.target import load_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir):
    return load_target(str(target_dir), torch.float32)


@pytest.fixture
def make(tmp_path, target):
    """`make(layout, **config)`: a drafter's directory in that layout."""

    def build(layout="zlab", dtype=torch.float32, **changes):
        place, out = tmp_path / "saved", tmp_path / "drafter"
        save_drafter(fitting_drafter(**changes), place, dtype=torch.float32)
        if layout == "torchspec":
            to_torchspec(place)
            return place
        source = read_checkpoint(place)
        export_drafter(source, out, layout, verifier=Verifier.of(target), dtype=dtype)
        return out

    return build


def kinds(found):
    return [finding.kind for finding in found.findings]


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("layout", ["zlab", "sglang", "speculators", "torchspec"])
def test_a_sound_drafter_has_no_findings(make, target, layout, with_target):
    place = make(layout)
    found = inspect_checkpoint(place, target if with_target else None, probe_tokens=8)
    assert found.findings == []
    assert found.layout == ("zlab" if layout == "sglang" else layout)
    assert found.config == fitting_config()
    expected = sum(p.numel() for p in fitting_drafter().parameters())
    assert found.parameters == expected
    assert found.own_parameters == (2 * 47 * 16 if layout == "speculators" else 0)
    assert found.size == 4 * (found.parameters + found.own_parameters)
    assert (found.agreement is not None) == with_target
    rows = dict(found.rows())
    assert rows["block size"] == "4, the anchor included"
    assert rows["taps"] == "1, 2, 3 of 6 target layers"
    assert rows["mask token"] == "6 of 47 rows"
    assert rows["dtype"].startswith("float32 (")


def test_a_foreign_speculators_drafter_may_leave_out_the_depth(make, target):
    place = make("speculators")
    edit_config(place, lambda raw: raw["transformer_layer_config"].pop("num_target_layers"))
    found = inspect_checkpoint(place)
    assert found.findings == []
    assert dict(found.rows())["taps"] == "1, 2, 3 of an unknown number of target layers"
    assert found.to_dict()["config"]["num_target_layers"] is None
    found = inspect_checkpoint(place, target)
    assert found.findings == []
    assert found.config.num_target_layers == 6


# What is done to the directory, the kind of finding, and words of it.
BROKEN = {
    "no config": (lambda p: (p / "config.json").unlink(), "config", "config.json is missing"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), "config", "be read"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "files", "is missing"),
    "weights cut": (
        lambda p: (p / "model.safetensors").write_bytes(
            (p / "model.safetensors").read_bytes()[:-10]
        ),
        "files",
        "cannot be read",
    ),
    "another model": (
        lambda p: (p / "config.json").write_text('{"speculators_model_type": "eagle3"}'),
        "format",
        "'eagle3'",
    ),
    "renamed": (
        lambda p: edit_tensors(p, lambda t: t.update({"proj.weight": t.pop("fc.weight")})),
        "tensors",
        "fc.weight is missing; was it renamed to proj.weight?",
    ),
    "missing": (
        lambda p: edit_tensors(p, lambda t: t.pop("norm.weight")),
        "tensors",
        "norm.weight is missing",
    ),
    "unknown": (
        lambda p: edit_tensors(p, lambda t: t.update(rotary=torch.ones(5))),
        "tensors",
        "rotary is unknown",
    ),
    "mis-shaped": (
        lambda p: edit_tensors(p, lambda t: t.update({"fc.weight": t["fc.weight"].T})),
        "tensors",
        "fc.weight has shape (48, 16), the config asks for (16, 48)",
    ),
    "quantised": (
        lambda p: edit_tensors(p, lambda t: t.update({"norm.weight": t["norm.weight"].byte()})),
        "dtype",
        "norm.weight has type torch.uint8",
    ),
    "NaN": (
        lambda p: edit_tensors(p, lambda t: t["fc.weight"][0, :2].fill_(float("nan"))),
        "nan",
        "fc.weight holds 2 NaN or infinite numbers of 768",
    ),
    "infinite": (
        lambda p: edit_tensors(p, lambda t: t["norm.weight"][3].fill_(float("-inf"))),
        "nan",
        "norm.weight holds 1",
    ),
    "all zero": (
        lambda p: edit_tensors(p, lambda t: t["layers.1.self_attn.o_proj.weight"].zero_()),
        "zero",
        "layers.1.self_attn.o_proj.weight is all zero",
    ),
    "shifted, by an extra tensor": (
        lambda p: edit_tensors(p, lambda t: t.update({"markov_head.weight": torch.ones(2, 2)})),
        "shifted-labels",
        "it has the tensor markov_head.weight",
    ),
}


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("case", BROKEN)
def test_each_way_to_break_the_files_is_found(make, layout, case):
    damage, kind, text = BROKEN[case]
    place = make(layout)
    damage(place)
    found = inspect_checkpoint(place)
    assert kind in kinds(found)
    assert any(text in finding.text for finding in found.findings)


def decoder(raw):
    return raw.get("transformer_layer_config", raw)


def outer(raw, name, value):
    """Set an entry where the layout has it."""
    (raw if "speculators_model_type" in raw else raw["dflash_config"])[name] = value


def taps(raw, ids):
    if "speculators_model_type" in raw:
        raw["aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    else:
        raw["dflash_config"]["target_layer_ids"] = ids


WRONG_ENTRIES = {
    "mask token behind the vocabulary": (
        lambda raw: outer(raw, "mask_token_id", 47),
        "mask-token",
        "47 is not a row of the embedding (0..46)",
    ),
    "no mask token": (
        lambda raw: outer(raw, "mask_token_id", None),
        "mask-token",
        "mask_token_id is missing",
    ),
    "taps one too high": (lambda raw: taps(raw, [2, 3, 4]), "layer-ids", "look off by one"),
    "taps one too low": (lambda raw: taps(raw, [0, 1, 2]), "layer-ids", "look off by one"),
    "taps beyond the target": (lambda raw: taps(raw, [1, 2, 6]), "layer-ids", "go beyond"),
    "taps before the first layer": (lambda raw: taps(raw, [-1, 2, 3]), "layer-ids", "before the"),
    "two thetas": (
        lambda raw: decoder(raw).update(rope_theta=1e6),
        "rope",
        "rope_theta is 1000000.0, in rope_parameters 10000.0",
    ),
    "scaling in one spelling only": (
        lambda raw: decoder(raw)["rope_parameters"].update(rope_type="yarn", factor=4.0),
        "rope",
        "rope_scaling is of the type 'default', rope_parameters 'yarn'",
    ),
    "unknown scaling": (
        lambda raw: decoder(raw).update(
            rope_scaling={"rope_type": "longrope"}, rope_parameters={"rope_type": "longrope"}
        ),
        "rope",
        "'longrope' is not supported",
    ),
    "slot 0 predicts": (
        lambda raw: raw.update(sample_from_anchor=True),
        "shifted-labels",
        "it sets sample_from_anchor",
    ),
    "a relative by name": (
        lambda raw: raw.update(architectures=["Qwen3DSparkModel"]),
        "shifted-labels",
        "it calls itself dspark",
    ),
    "sliding windows": (
        lambda raw: decoder(raw).update(layer_types=["sliding_attention"] * 2),
        "config",
        "sliding-window",
    ),
    "heads that do not divide": (
        lambda raw: decoder(raw).update(num_key_value_heads=3),
        "config",
        "must be a multiple",
    ),
    "an entry of the wrong kind": (
        lambda raw: decoder(raw).update(rms_norm_eps=None, hidden_size="wide"),
        "config",
        "hidden_size is 'wide'",
    ),
}


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_each_wrong_entry_is_found(make, layout, case):
    change, kind, text = WRONG_ENTRIES[case]
    place = make(layout)
    edit_config(place, change)
    found = inspect_checkpoint(place)
    assert kind in kinds(found)
    assert any(text in finding.text for finding in found.findings)


def test_block_sizes_that_differ(make):
    place = make()
    edit_config(place, lambda raw: raw["dflash_config"].update(block_size=8))
    assert kinds(inspect_checkpoint(place)) == ["block-size"]


def test_one_wrong_entry_does_not_hide_another(make):
    place = make()

    def change(raw):
        raw["dflash_config"].update(mask_token_id=99, target_layer_ids=[1, 2, 9])
        raw["rope_theta"] = 3.0

    edit_config(place, change)
    edit_tensors(place, lambda t: t["norm.weight"].zero_())
    assert sorted(kinds(inspect_checkpoint(place))) == ["layer-ids", "mask-token", "rope", "zero"]


@pytest.mark.parametrize(
    ("layout", "shift", "text"),
    [
        ("zlab", 1, "[2, 10, 18, 26, 34] are the usual ones [1, 9, 17, 25, 33] +1"),
        ("speculators", -1, "[1, 9, 17, 25, 33] are the usual ones [2, 10, 18, 26, 34] -1"),
    ],
)
def test_off_by_one_is_told_as_the_layout_writes_it(layout, shift, text):
    """The two ways to take one layout's numbers for the other's."""
    ids = tuple(i + shift for i in (1, 9, 17, 25, 33))
    config = fitting_config(num_target_layers=36, target_layer_ids=ids)
    (finding,) = check_layer_ids(config, layout)
    assert text in finding.text
    usual = fitting_config(num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33))
    assert check_layer_ids(usual, layout) == []


def test_one_tap_is_free(make):
    assert inspect_checkpoint(make(target_layer_ids=(4,))).findings == []


class TestNotes:
    """What is no fault: exit 0, and said."""

    def note(self, place):
        found = inspect_checkpoint(place)
        assert found.findings == []
        return {note.kind: note.text for note in found.notes}

    def test_a_file_of_ours_has_none(self, make):
        assert self.note(make()) == {}

    @pytest.mark.parametrize(("gone", "version"), [("rope_parameters", 5), ("rope_theta", 4)])
    def test_one_rope_spelling(self, make, gone, version):
        place = make()
        edit_config(place, lambda raw: raw.pop(gone))
        assert f"readers of transformers {version}" in self.note(place)["rope"]

    def test_code_that_is_not_there(self, make):
        place = make()
        edit_config(place, lambda raw: raw.update(auto_map={"AutoModel": "dflash.X"}))
        assert "not beside the weights" in self.note(place)["auto-map"]

    def test_entries_that_zlabs_loader_reads(self, make):
        place = make()
        edit_config(place, lambda raw: raw.pop("layer_types"))
        assert "layer_types is not at the top" in self.note(place)["config"]

    def test_stored_in_another_type_than_stated(self, make):
        place = make()
        edit_config(place, lambda raw: raw.update(dtype="bfloat16"))
        assert "says bfloat16, the tensors are float32" in self.note(place)["dtype"]


class TestBesideTheTarget:
    @pytest.mark.parametrize(
        ("changes", "kind", "text"),
        [
            ({"hidden_size": 32, "vocab_size": 50}, "target", "hidden size 32, not 16"),
            ({"hidden_size": 32, "vocab_size": 50}, "target", "vocabulary 50, not 47"),
            ({"num_target_layers": 7}, "target", "layers 7, not 6"),
            ({"rope_theta": 1e6}, "rope", "rope_theta is 1e+06, the target's 10000"),
            (
                {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                "rope",
                "'factor': 2.0}, the target's None",
            ),
            ({"mask_token_id": 20}, "mask-token", "20 is 'w13', which occurs in texts"),
            ({"mask_token_id": 2}, "mask-token", "2 is '<end>', which ends or pads a text"),
            ({"mask_token_id": 0}, "mask-token", "0 is '<pad>', which ends or pads a text"),
        ],
    )
    def test_differences(self, make, target, changes, kind, text):
        place = make(**changes)
        assert inspect_checkpoint(place).findings == []
        found = inspect_checkpoint(place, target, probe_tokens=4)
        assert (kind, True) in [(f.kind, text in f.text) for f in found.findings]
        assert found.agreement is None  # a wrong drafter is not decoded with

    @pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
    def test_embedding_and_head(self, make, target, name):
        place = make("speculators")
        edit_tensors(place, lambda t: t[name][3:5].add_(0.5))
        assert inspect_checkpoint(place).findings == []
        found = inspect_checkpoint(place, target)
        assert kinds(found) == ["frozen-weights"]
        assert f"{name} differs from the target's in 2 of 47 rows" in found.findings[0].text

    def test_a_tied_head_that_is_not_the_targets(self, make, target):
        place = make("speculators")
        edit_tensors(place, lambda t: t.pop("lm_head.weight"))
        edit_config(place, lambda raw: raw.update(tie_word_embeddings=True))
        assert inspect_checkpoint(place).findings == []
        assert kinds(inspect_checkpoint(place, target)) == ["frozen-weights"]

    def test_rounded_embeddings_are_the_targets(self, make, target):
        place = make("speculators", dtype=torch.bfloat16)
        assert inspect_checkpoint(place, target).findings == []


class TestCommand:
    def test_clean(self, make, target_dir, capsys):
        place = make()
        assert cli.main(["inspect", str(place)]) == 0
        out = capsys.readouterr().out
        assert "nothing found (no --target to compare with)" in out
        for text in ("zlab", "block size", "mask token", "theta 10000"):
            assert text in out
        assert cli.main(["inspect", str(place), "--target", str(target_dir), "--probe", "4"]) == 0
        out = capsys.readouterr().out
        assert f"nothing found beside {target_dir}" in out
        assert "drafted tokens are the target's" in out

    def test_findings_are_exit_1(self, make, capsys):
        place = make()
        edit_tensors(place, lambda t: t["norm.weight"].zero_())
        assert cli.main(["inspect", str(place)]) == 1
        assert "finding: zero: norm.weight is all zero" in capsys.readouterr().out

    def test_json(self, make, target_dir, capsys):
        place = make("speculators")
        argv = ["inspect", str(place), "--json", "--target", str(target_dir), "--probe", "4"]
        assert cli.main(argv) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["format"] == "speculators"
        assert found["config"]["target_layer_ids"] == [1, 2, 3]
        assert found["findings"] == []
        assert found["target"] == str(target_dir)
        assert 0 <= found["agreement"]["plain"] <= 1
        edit_config(place, lambda raw: raw.update(mask_token_id=99))
        assert cli.main(["inspect", str(place), "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [f["kind"] for f in found["findings"]] == ["mask-token"]
        assert found["config"] is None

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            (["--probe", "-1"], "--probe is -1"),
            (["--probe", "x"], "invalid int value: 'x'"),
            (["--target", "./nowhere"], "--target: there is no target"),
            (["--tarjet", "x"], "unknown argument: --tarjet"),
        ],
    )
    def test_a_wrong_command_line_is_exit_2(self, make, capsys, more, text):
        assert cli.main(["inspect", str(make()), *more]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1

    def test_nothing_there_is_exit_2(self, tmp_path, capsys):
        assert cli.main(["inspect", str(tmp_path / "no")]) == 2
        assert "there is no directory" in capsys.readouterr().err
        assert cli.main(["inspect"]) == 2

    def test_config_of_another_directory(self, tmp_path, capsys):
        """An empty directory is a finding, not a crash."""
        assert cli.main(["inspect", str(tmp_path)]) == 1
        assert "config.json is missing" in capsys.readouterr().out


def entries(raw, before=()):
    for name, value in raw.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from entries(value, (*before, name))


@pytest.mark.parametrize("value", [None, "x", [1, "a"], {"a": 1}, -1, True])
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_no_value_of_any_entry_is_a_crash(make, layout, value):
    """A file from elsewhere may hold anything: inspect says so, load refuses or reads it."""
    place = make(layout)
    sound = json.dumps(read_config(place))
    for path in entries(json.loads(sound)):
        raw = part = json.loads(sound)
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value
        (place / "config.json").write_text(json.dumps(raw))
        inspect_checkpoint(place)
        with contextlib.suppress(CheckpointError):
            read_checkpoint(place)
