"""Every layout out and in again: equal bits, equal logits; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from format_files import (
    edit_config,
    edit_tensors,
    fitting_drafter,
    read_config,
    to_torchspec,
)
from model_dir import write_model
from safetensors.torch import load_file

from dflash import cli, export
from dflash.checkpoint_format import load_drafter, read_checkpoint, save_drafter
from dflash.errors import CheckpointError, ConfigError
from dflash.export import Verifier, export_drafter
from dflash.geometry import block_positions, block_token_ids
from dflash.mask import block_mask
from dflash.target import load_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir):
    return load_target(str(target_dir), torch.float32).with_taps((1, 2, 3))


@pytest.fixture
def source(tmp_path):
    """A drafter in float32 and the directory it was saved in."""
    drafter = fitting_drafter(seed=3)
    save_drafter(drafter, tmp_path / "source", dtype=torch.float32)
    return drafter, tmp_path / "source"


def logits(target, drafter):
    """Of two blocks over some text."""
    ids = torch.tensor([[7, 9, 12, 30, 8, 40, 11, 10]])
    lengths = torch.tensor([8])
    context, _ = target.features(ids, lengths, last_hidden=False)
    anchors = torch.tensor([[2, 4]])
    hidden = drafter(
        target.embed(block_token_ids(ids, anchors, 4, drafter.config.mask_token_id)),
        context,
        torch.arange(8).unsqueeze(0),
        block_positions(anchors, 4),
        block_mask("sdpa", anchors, torch.ones(1, 2, dtype=torch.bool), 8, 4, lengths),
    )
    return target.head(hidden)


def assert_equal(target, one, other):
    assert one.config == other.config
    mine, theirs = one.state_dict(), other.state_dict()
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    with torch.no_grad():
        assert torch.equal(logits(target, one), logits(target, other))


@pytest.mark.parametrize("max_bytes", [None, 2000])
@pytest.mark.parametrize("layout", ["zlab", "speculators", "sglang"])
def test_round_trip_is_exact(source, target, tmp_path, layout, max_bytes):
    drafter, place = source
    out = tmp_path / "deep" / "out"
    written = export_drafter(
        read_checkpoint(place),
        out,
        layout,
        verifier=Verifier.of(target),
        dtype=torch.float32,
        max_bytes=max_bytes,
    )
    assert (len(written.files) > 3) == (max_bytes is not None)
    assert list(written.files) == sorted(p.name for p in out.iterdir())
    again, config = load_drafter(out, target=target.spec, frozen=target)
    assert_equal(target, drafter, again)
    assert config == drafter.config
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    raw = read_config(out)
    assert raw["dtype"] == "float32"
    assert "auto_map" not in raw


@pytest.mark.parametrize("stated", [True, False])
def test_torchspec_is_imported(source, target, stated):
    drafter, place = source
    to_torchspec(place, stated=stated)
    if not stated:
        with pytest.raises(CheckpointError, match="name the target"):
            load_drafter(place)
    again, _ = load_drafter(place, target=target.spec if not stated else None)
    assert read_checkpoint(place, target=target.spec).layout == "torchspec"
    assert_equal(target, drafter, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_type_of_the_weights(source, target, tmp_path, dtype):
    drafter, place = source
    found = read_checkpoint(place)
    export_drafter(found, tmp_path / "a", "speculators", verifier=Verifier.of(target), dtype=dtype)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {dtype}
    assert torch.equal(stored["fc.weight"], drafter.fc.weight.to(dtype))
    assert torch.equal(stored["embed_tokens.weight"], target.embed_weight.to(dtype))
    load_drafter(tmp_path / "a", target=target.spec, frozen=target)  # compared in the coarser type


def test_both_rope_spellings_are_written_in_every_layout(tmp_path, target):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    drafter = fitting_drafter(rope_theta=5e5, rope_scaling=scaling)
    save_drafter(drafter, tmp_path / "source")
    for layout in ("zlab", "speculators", "sglang"):
        out = tmp_path / layout
        export_drafter(
            read_checkpoint(tmp_path / "source"), out, layout, verifier=Verifier.of(target)
        )
        raw = read_config(out)
        raw = raw.get("transformer_layer_config", raw)
        assert raw["rope_theta"] == 5e5
        assert raw["rope_scaling"] == scaling
        assert raw["rope_parameters"] == scaling | {"rope_theta": 5e5}
        assert load_drafter(out)[1].rope_scaling == scaling


def test_a_tied_head_is_stored_beside_the_embedding(source, target, tmp_path):
    """One tensor under two names would be refused by safetensors."""
    embed = target.embed_weight
    verifier = Verifier("tied", ("X",), embed, embed)
    export_drafter(
        read_checkpoint(source[1]),
        tmp_path / "out",
        "speculators",
        verifier=verifier,
        dtype=torch.float32,
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], embed)
    assert torch.equal(stored["embed_tokens.weight"], embed)


def test_a_tied_speculators_checkpoint_needs_no_head(source, target, tmp_path):
    out = tmp_path / "out"
    export_drafter(read_checkpoint(source[1]), out, "speculators", verifier=Verifier.of(target))
    edit_tensors(out, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        load_drafter(out)
    edit_config(out, lambda raw: raw.update(tie_word_embeddings=True))
    own = read_checkpoint(out).own
    assert torch.equal(own["lm_head.weight"], own["embed_tokens.weight"])
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the target's in 47 of"):
        load_drafter(out, target=target.spec, frozen=target)


def test_a_smaller_head_is_compared_by_its_map(source, target, tmp_path):
    out = tmp_path / "out"
    export_drafter(read_checkpoint(source[1]), out, "speculators", verifier=Verifier.of(target))
    kept = torch.tensor([0, 2, 3, 10, 46])

    def shrink(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = kept - torch.arange(5)
        tensors["t2d"] = torch.zeros(47, dtype=torch.bool).scatter_(0, kept, True)

    edit_tensors(out, shrink)
    load_drafter(out, target=target.spec, frozen=target)
    with pytest.raises(ConfigError, match="does not have them in full"):
        Verifier.stored_in(read_checkpoint(out))
    edit_tensors(out, lambda t: t["d2t"][3].add_(1))  # points one token further
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs .* in 1 of 5 rows"):
        load_drafter(out, target=target.spec, frozen=target)
    edit_tensors(out, lambda t: t["d2t"][4].add_(1))
    with pytest.raises(CheckpointError, match="d2t does not map"):
        load_drafter(out, target=target.spec, frozen=target)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: t.update({"projection.weight": t.pop("fc.weight")}),
            "fc.weight is missing; was it renamed to projection.weight",
        ),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(3)), "extra is unknown"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]}),
            r"fc.weight has shape \(16, 32\), the config asks for \(16, 48\)",
        ),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}),
            "norm.weight has type torch.int8: quantised",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_wrong_tensors_are_named(source, target, tmp_path, layout, change, text):
    out = tmp_path / "out"
    export_drafter(read_checkpoint(source[1]), out, layout, verifier=Verifier.of(target))
    edit_tensors(out, change)
    with pytest.raises(CheckpointError, match=text):
        load_drafter(out)


def test_another_embedding_is_refused(source, target, tmp_path):
    out = tmp_path / "out"
    export_drafter(read_checkpoint(source[1]), out, "speculators", verifier=Verifier.of(target))
    edit_tensors(out, lambda t: t["embed_tokens.weight"][5].add_(1))
    load_drafter(out)  # without the target nobody can tell
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight differs .* in 1 of 47 rows"):
        load_drafter(out, target=target.spec, frozen=target)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1e6, torch.float16, "fc.weight would hold NaN or infinite numbers as float16 .by dtype"),
        (float("nan"), torch.bfloat16, "already in the source"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(source, tmp_path, value, dtype, text):
    _, place = source
    edit_tensors(place, lambda t: t["fc.weight"][0, 0].fill_(value))
    with pytest.raises(CheckpointError, match=text):
        export_drafter(read_checkpoint(place), tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_the_code_that_auto_map_names_goes_along_for_zlab_only(source, tmp_path):
    _, place = source
    auto_map = {"AutoModel": "modelling.Drafter"}
    edit_config(place, lambda raw: raw.update(auto_map=auto_map))
    export_drafter(read_checkpoint(place), tmp_path / "without")
    assert "auto_map" not in read_config(tmp_path / "without")
    (place / "modelling.py").write_text("# theirs\n")
    export_drafter(read_checkpoint(place), tmp_path / "zlab")
    export_drafter(read_checkpoint(place), tmp_path / "sglang", "sglang")
    assert read_config(tmp_path / "zlab")["auto_map"] == auto_map
    assert (tmp_path / "zlab" / "modelling.py").read_text() == "# theirs\n"
    assert "auto_map" not in read_config(tmp_path / "sglang")
    assert not (tmp_path / "sglang" / "modelling.py").exists()


class TestOut:
    """What may be written where."""

    def again(self, place, out, **options):
        return export_drafter(read_checkpoint(place), out, dtype=torch.float32, **options)

    def test_an_existing_directory_is_refused_unless_told(self, source, tmp_path):
        drafter, place = source
        out = tmp_path / "out"
        save_drafter(fitting_drafter(seed=9), out)
        (out / "README.md").write_text("old")
        with pytest.raises(ConfigError, match=r"out is there already: .*--overwrite"):
            self.again(place, out)
        self.again(place, out, overwrite=True)
        assert torch.equal(load_drafter(out)[0].fc.weight, drafter.fc.weight)
        assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda p: (p / "out").write_text("x"), "is no directory"),
            (lambda p: (p / "out").symlink_to(p / "source"), "holds the source"),
            (
                lambda p: ((p / "out").mkdir(), (p / "out" / "thesis.txt").write_text("x")),
                "something else than a drafter",
            ),
            (
                lambda p: (
                    save_drafter(fitting_drafter(), p / "out"),
                    (p / "out" / "train_state.json").write_text("{}"),
                ),
                "checkpoint of a run",
            ),
        ],
    )
    def test_only_a_drafter_gives_way(self, source, tmp_path, make, text):
        make(tmp_path)
        before = sorted(str(p) for p in tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=text):
            self.again(source[1], tmp_path / "out", overwrite=True)
        assert sorted(str(p) for p in tmp_path.rglob("*")) == before

    def test_the_source_and_what_holds_it_stay(self, source):
        _, place = source
        for out in (place, place.parent):
            with pytest.raises(ConfigError, match="holds the source"):
                self.again(place, out, overwrite=True)

    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize("where", ["write", "rename"])
    def test_a_failure_leaves_what_was_there(self, source, tmp_path, monkeypatch, old, where):
        out = tmp_path / "out"
        older = fitting_drafter(seed=9)
        if old:
            save_drafter(older, out, dtype=torch.float32)

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        if where == "write":
            monkeypatch.setattr(export, "write_weights", fail)
        else:
            plain = type(tmp_path).rename

            def rename(path, to):
                # Only the new directory's own rename fails, not the old one's way back.
                return fail() if path.name.startswith(".out.") and ".old." not in path.name else (
                    plain(path, to)
                )  # fmt: skip

            monkeypatch.setattr(type(tmp_path), "rename", rename)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left"):
            self.again(source[1], out, overwrite=True)
        monkeypatch.undo()
        assert sorted(p.name for p in tmp_path.iterdir()) == (
            ["out", "source"] if old else ["source"]
        )
        if old:
            assert torch.equal(load_drafter(out)[0].fc.weight, older.fc.weight)


class TestCommand:
    def test_zlab_by_default(self, source, tmp_path, capsys):
        _, place = source
        assert cli.main(["export", str(place), str(tmp_path / "out")]) == 0
        out = capsys.readouterr().out
        assert "zlab, bfloat16" in out
        assert '"num_speculative_tokens": 3' in out
        assert load_drafter(tmp_path / "out", dtype=None)[0].fc.weight.dtype == torch.bfloat16

    def test_sglang_counts_the_anchor(self, source, tmp_path, capsys):
        assert cli.main(["export", str(source[1]), str(tmp_path / "o"), "--format", "sglang"]) == 0
        assert "--speculative-num-draft-tokens 4" in capsys.readouterr().out

    def test_json_shards_and_type(self, source, tmp_path, capsys):
        out = tmp_path / "out"
        argv = f"export {source[1]} {out} --json --dtype float16 --max-shard-size 3KB"
        assert cli.main(argv.split()) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["path"] == str(out)
        assert (found["format"], found["dtype"]) == ("zlab", "float16")
        assert found["bytes"] == 2 * found["parameters"]
        assert "model.safetensors.index.json" in found["files"]
        sizes = [p.stat().st_size for p in out.glob("*.safetensors")]
        assert len(sizes) > 2

    def test_speculators_with_a_target_and_back_without_one(
        self, source, target_dir, target, tmp_path, capsys
    ):
        drafter, place = source
        there, back = tmp_path / "there", tmp_path / "back"
        argv = f"export {place} {there} --format speculators --dtype float32"
        assert cli.main(argv.split()) == 2
        assert "name the target: --target" in capsys.readouterr().err
        assert cli.main([*argv.split(), "--target", str(target_dir)]) == 0
        raw = read_config(there)["speculators_config"]["verifier"]
        assert raw == {"name_or_path": str(target_dir), "architectures": ["LlamaForCausalLM"]}
        # Its own embedding and head are enough to write it again.
        argv = f"export {there} {back} --format speculators --dtype float32"
        assert cli.main(argv.split()) == 0
        assert read_config(back) == read_config(there)
        assert_equal(target, drafter, load_drafter(back, target=target.spec, frozen=target)[0])

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            (["--max-shard-size", "big"], "--max-shard-size is 'big'"),
            (["--max-shard-size", "0GB"], "--max-shard-size is '0GB'"),
            (["--format", "gguf"], "invalid choice: 'gguf'"),
            (["--target", "./nowhere"], "--target: there is no target './nowhere'"),
            (["--overwite"], "unknown argument: --overwite"),
        ],
    )
    def test_a_wrong_command_line_is_exit_2(self, source, tmp_path, capsys, more, text):
        assert cli.main(["export", str(source[1]), str(tmp_path / "out"), *more]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_no_source(self, tmp_path, capsys):
        assert cli.main(["export", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
        assert "there is no directory" in capsys.readouterr().err
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
        assert "has no checkpoint yet" in capsys.readouterr().err

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as caught:
            cli.main(["export", "--help"])
        assert caught.value.code == 0
        assert "--max-shard-size" in capsys.readouterr().out
