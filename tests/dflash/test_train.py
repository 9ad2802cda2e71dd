"""Whole runs on a tiny model: what they leave behind, that they repeat, how they fail and go on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from model_dir import write_chats, write_model
from safetensors.torch import load_file, save_file

from dflash import cli, placement
from dflash import evaluate as evaluate_module
from dflash import train as train_module
from dflash.checkpoint_format import load_drafter
from dflash.config import DataSettings
from dflash.journal import Journal
from dflash.target import Target

SMALL = [
    "data.held_out=2",
    "data.max_new_tokens=12",
    "data.responses=missing",
    "drafter.taps=3",
    "features.multiple=8",
    "train.steps=6",
    "train.batch=2",
    "train.anchors=4",
    "train.backend=eager",
    "train.log_every=2",
    "train.checkpoint_every=2",
    "eval.max_new_tokens=16",
    "loss.ce=0.5",
    "target.dtype=float32",
]


@pytest.fixture(scope="module", autouse=True)
def one_core():
    with pytest.MonkeyPatch.context() as patch:
        for module in (train_module, evaluate_module, placement):
            patch.setattr(module, "cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    write_model(directory / "model")
    write_chats(directory / "chats.jsonl")
    return directory


def arguments(inputs, run, *more):
    return [
        "train",
        *("--target", str(inputs / "model"), "--data", str(inputs / "chats.jsonl")),
        *("--run", str(run), *SMALL, *more),
    ]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    """(step, loss, gradient norm) to the last bit."""
    return [(m["step"], m["loss"].hex(), m["grad_norm"].hex()) for m in metrics(run)]


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An undisturbed run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main(arguments(inputs, run)) == 0
    return run


def test_a_run_leaves_all_it_promises(inputs, whole):
    assert [m["step"] for m in metrics(whole)] == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        "step-000004",
        "step-000006",
    ]
    figures = json.loads((whole / "evaluation.json").read_text())
    assert figures["prompts"] == figures["outputs_equal_to_greedy"] == 2
    assert figures["acceptance_length_macro"] >= 1
    assert figures["step"] == 6
    sessions = json.loads((whole / "environment.json").read_text())
    assert [s["torch"] for s in sessions] == [torch.__version__]
    assert {p["patch"] for p in sessions[0]["torchcompat"]["patches"]} >= {"fx_patcher"}
    settings = json.loads((whole / "config.json").read_text())
    assert settings["train"]["backend"] == "eager"
    assert settings["placement"]["drafters"] == "cpu,cpu"
    _, config = load_drafter(whole / "checkpoints" / "step-000006")
    assert (config.block_size, config.target_layer_ids) == (4, (1, 2, 3))
    answers = (whole / "responses.jsonl").read_text().splitlines()
    assert 3 <= len(answers) <= 7


def test_the_final_table_is_printed(inputs, tmp_path, capsys):
    assert cli.main(arguments(inputs, tmp_path / "run", "train.steps=2")) == 0
    out = capsys.readouterr().out
    for text in (
        "2 held-out prompts",
        "acceptance length",
        "equal to greedy",
        "2 of 2 outputs",
        "target alone",
        "step 2/2",
        "waited: targets",
    ):
        assert text in out


def test_one_target_worker_or_two_same_bits(inputs, whole, tmp_path):
    assert cli.main(arguments(inputs, tmp_path / "run", "--targets", "cpu,cpu")) == 0
    assert losses(tmp_path / "run") == losses(whole)


def test_another_seed_gives_other_losses(inputs, whole, tmp_path):
    assert cli.main(arguments(inputs, tmp_path / "run", "--seed", "1")) == 0
    assert losses(tmp_path / "run") != losses(whole)


def test_features_anew_for_every_batch_give_a_run_too(inputs, tmp_path):
    more = ["features.cache=off", "--targets", "cpu,cpu", "loss.head_vocab=full", "loss.kl=0"]
    assert cli.main(arguments(inputs, tmp_path / "run", *more)) == 0
    assert len(metrics(tmp_path / "run")) == 6


def test_a_failed_thread_ends_the_run_and_resume_goes_on_exactly(
    inputs, whole, tmp_path, monkeypatch, capfd
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        real = Journal.on_step

        def fail_at_five(self, lr, result, waits):
            if self._step == 4:
                raise ZeroDivisionError("out of luck")
            real(self, lr, result, waits)

        patch.setattr(Journal, "on_step", fail_at_five)
        started = time.monotonic()
        assert cli.main(arguments(inputs, run)) == 1
        assert time.monotonic() - started < 60
    err = capfd.readouterr().err
    assert err.index("thread drafter-0 failed:") < err.index("dflash: thread 'drafter-0' failed")
    assert "ZeroDivisionError: out of luck" in err
    assert [m["step"] for m in metrics(run)] == [1, 2, 3, 4]
    written = (run / "responses.jsonl").read_text()
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert losses(run) == losses(whole)
    assert (run / "responses.jsonl").read_text() == written
    assert len(json.loads((run / "environment.json").read_text())) == 2


def test_a_failing_target_is_named_first_and_stops_everybody(inputs, tmp_path, monkeypatch, capfd):
    real = Target.features
    calls = []

    def fail(self, *args, **kwargs):
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            raise RuntimeError("the target broke")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Target, "features", fail)
    more = ["features.cache=off", "loss.head_vocab=full", "drafter.init=random"]
    assert cli.main(arguments(inputs, tmp_path / "run", *more)) == 1
    err = capfd.readouterr().err
    assert err.count("failed:") == 2
    assert err.index("thread target-0 failed:") < err.index("dflash: thread 'target-0' failed")
    assert calls[1] == "target-0"
    assert not [t for t in threading.enumerate() if t.name.startswith(("target-", "drafter-"))]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_writes_a_checkpoint_and_resume_goes_on_exactly(
    inputs, whole, tmp_path, number, code
):
    run = tmp_path / "run"
    slow = (
        "import sys, time; from dflash import cli; from dflash.journal import Journal\n"
        "real = Journal.on_step\n"
        "def on_step(self, *a):\n"
        "    real(self, *a)\n"
        "    if self._step == 3: print('at three', flush=True); time.sleep(3)\n"
        "Journal.on_step = on_step\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", slow, *arguments(inputs, run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if "at three" in line:
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "checkpoint of step 3 written" in out
    assert f"--resume {run}" in out
    assert "Traceback" not in err
    assert (run / "checkpoints" / "step-000003" / "model.safetensors").exists()
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert losses(run) == losses(whole)


def test_a_finished_run_resumes_to_its_evaluation(inputs, whole, tmp_path, capsys):
    before = losses(whole)
    assert cli.main(["train", "--resume", str(whole), "eval.max_new_tokens=8"]) == 0
    assert "goes on after step 6" in capsys.readouterr().out
    assert losses(whole) == before


def test_a_trained_drafter_is_a_start(inputs, whole, tmp_path, capsys):
    init = whole / "checkpoints" / "step-000006"
    assert cli.main(arguments(inputs, tmp_path / "run", f"drafter.init={init}")) == 0
    assert metrics(tmp_path / "run")[0]["loss"] < metrics(whole)[0]["loss"]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_what_a_run_exports_is_sound_and_a_start(inputs, whole, tmp_path, layout, capsys):
    """A run knows its target and its float32 weights, so neither has to be named."""
    out, run = tmp_path / "out", tmp_path / "run"
    argv = ["export", str(whole), str(out), "--format", layout, "--dtype", "float32"]
    assert cli.main(argv) == 0
    masters = load_file(whole / "checkpoints" / "step-000006" / "train_state.safetensors")
    rounded = load_drafter(whole)[0].fc.weight
    exported = load_drafter(out)[0].fc.weight
    assert not torch.equal(exported, rounded)
    assert torch.equal(exported.bfloat16(), rounded.bfloat16())
    assert torch.isin(exported, masters["weights"]).all()
    check = ["inspect", str(out), "--target", str(inputs / "model"), "--probe", "4"]
    assert cli.main(check) == 0, capsys.readouterr().out
    assert cli.main(arguments(inputs, run, "--init-from", str(out), "train.steps=1")) == 0
    assert metrics(run)[0]["loss"] < metrics(whole)[0]["loss"]


def test_masters_of_another_drafter_are_refused(whole, tmp_path, capsys):
    place = tmp_path / "checkpoint"
    shutil.copytree(whole / "checkpoints" / "step-000006", place)
    facts = json.loads((place / "train_state.json").read_text())
    (place / "train_state.json").write_text(json.dumps(facts | {"layout": "0"}))
    argv = ["export", str(place), str(tmp_path / "out")]
    assert cli.main([*argv, "--dtype", "float32"]) == 1
    assert "belongs to a drafter of another shape" in capsys.readouterr().err
    assert cli.main(argv) == 0


class TestBadInput:
    def error(self, capsys, run, argv):
        code = cli.main(argv)
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert not run.exists(), "a run that cannot begin leaves nothing behind"
        return code, err

    def test_missing_model(self, inputs, tmp_path, capsys):
        run = tmp_path / "run"
        argv = arguments(inputs, run, "--target", str(tmp_path / "nothing"))
        code, err = self.error(capsys, run, argv)
        assert code == 1
        assert f"there is no target '{tmp_path / 'nothing'}'" in err

    def test_missing_data(self, inputs, tmp_path, capsys):
        run = tmp_path / "run"
        code, err = self.error(capsys, run, arguments(inputs, run, "--data", "nowhere.jsonl"))
        assert code == 1
        assert "there is no data file nowhere.jsonl" in err

    def test_a_line_that_is_no_conversation(self, inputs, tmp_path, capsys):
        run, data = tmp_path / "run", tmp_path / "bad.jsonl"
        data.write_text('{"prompt": "w1 w2"}\n\n{"question": "w1"}\n')
        code, err = self.error(capsys, run, arguments(inputs, run, "--data", str(data)))
        assert code == 1
        assert err.startswith(f"dflash: {data}:3: not a conversation: it has neither messages")

    def test_too_short_for_a_block(self, inputs, tmp_path, capsys):
        run, data = tmp_path / "run", tmp_path / "short.jsonl"
        lines = [{"prompt": f"w{n} w2", "response": "w3 w4 w5"} for n in (1, 2, 3)]
        data.write_text("\n".join(map(json.dumps, lines)))
        more = ["--data", str(data), "data.max_length=5", "data.held_out=0"]
        assert cli.main(arguments(inputs, run, *more)) == 1
        err = capsys.readouterr().err
        assert f"{data}:1: too short for a block" in err
        assert err.count("\n") == 1

    def test_a_drafter_of_another_target(self, inputs, whole, tmp_path, capsys):
        run = tmp_path / "run"
        other = write_model(tmp_path / "other", hidden=32)
        init = whole / "checkpoints" / "step-000006"
        argv = arguments(inputs, run, "--target", str(other), f"drafter.init={init}")
        code, err = self.error(capsys, run, argv)
        assert code == 1
        assert "was trained for another target" in err
        assert "hidden size 16, not 32" in err

    def test_a_drafter_with_another_embedding(self, inputs, whole, tmp_path, capsys):
        run, out = tmp_path / "run", tmp_path / "out"
        assert cli.main(["export", str(whole), str(out), "--format", "speculators"]) == 0
        weights = load_file(out / "model.safetensors")
        weights["embed_tokens.weight"] = weights["embed_tokens.weight"] + 1
        save_file(weights, out / "model.safetensors")
        code, err = self.error(capsys, run, arguments(inputs, run, "--init-from", str(out)))
        assert code == 1
        assert "embed_tokens.weight differs from the target's in 47 of 47 rows" in err

    def test_init_that_is_nothing(self, inputs, tmp_path, capsys):
        run = tmp_path / "run"
        code, err = self.error(capsys, run, arguments(inputs, run, "drafter.init=best"))
        assert code == 2
        assert "drafter.init is 'best'" in err

    def test_more_taps_than_the_target_has_room_for(self, inputs, tmp_path, capsys):
        run = tmp_path / "run"
        code, err = self.error(capsys, run, arguments(inputs, run, "drafter.taps=4"))
        assert code == 2
        assert "4 taps do not fit a target of 6 layers: at most 3" in err

    def test_everything_held_out(self, inputs, tmp_path, capsys):
        run = tmp_path / "run"
        code, err = self.error(capsys, run, arguments(inputs, run, "data.held_out=10"))
        assert code == 2
        assert "data.held_out is 10 of 10 conversations" in err

    def test_a_run_directory_that_is_taken(self, inputs, whole, capsys):
        before = losses(whole)
        assert cli.main(arguments(inputs, whole)) == 2
        assert "already holds a run" in capsys.readouterr().err
        assert losses(whole) == before

    def test_a_prompt_longer_than_the_target_reads(self, inputs, tmp_path, capsys):
        run, data = tmp_path / "run", tmp_path / "long.jsonl"
        lines = [{"prompt": "w1 " * 200}, {"prompt": "w1"}, {"prompt": "w2"}]
        data.write_text("\n".join(map(json.dumps, lines)))
        code = cli.main(arguments(inputs, run, "--data", str(data), "data.held_out=1"))
        assert code == 1
        assert f"{data}:1: its prompt has" in capsys.readouterr().err


def test_prepared_parts_do_not_change_the_held_out_prompts(inputs):
    """The same seed holds the same conversations out, whatever else is set."""
    found = [
        train_module.split(
            train_module.read_data(
                DataSettings(source=str(inputs / "chats.jsonl")), 0, train_module.Rejects("error")
            ),
            3,
            seed,
        ).held_out
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
