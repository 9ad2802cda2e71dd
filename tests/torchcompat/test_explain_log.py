"""`torchcompat explain LOG`: torch and torchcompat as the log has them, what is said."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchcompat import Hazard, PluginError, Sign, cli
from torchcompat.logs import explain
from torchcompat.logs.context import Context
from torchcompat.logs.signs import Known, Signs, known_hazards
from torchcompat.plugins import Registered
from torchcompat.verdict import State

LOGS = Path(__file__).parent / "logs"
FX = (LOGS / "fx_tracing_flag.log").read_text()
ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Explain a log of the given text; exit status and what was printed."""

    def explain_text(text: str | bytes, *options: str, name: str = "train.log") -> tuple[int, str]:
        data = text.encode() if isinstance(text, str) else text
        (tmp_path / name).write_bytes(data)
        status = cli.main(["explain", str(tmp_path / name), *options])
        return status, capsys.readouterr().out

    return explain_text


def findings(run: Run, text: str | bytes, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(text, "--json", **options)[1])
    return found


def test_the_story(run: Run) -> None:
    status, out = run(FX)
    assert status == 1
    lines = out.splitlines()
    assert "15 lines; torch 2.11.0+cu130, named in line 1" in lines[0]
    assert lines[2] == (
        "fx_tracing_flag: FX tracing in one thread must not stop compiled calls in another"
    )
    assert lines[3].startswith("  once, at line 4 (thread drafter-1): RuntimeError: Detected that")
    assert lines[4] == (
        "  patch fx_tracing_flag mends it in torch 2.11.0+cu130; "
        "the log does not say whether torchcompat was applied"
    )
    assert lines[5].startswith("  next: call torchcompat.apply() before the first torch.compile")
    assert len(lines) == 6


def test_as_json(run: Run) -> None:
    found = findings(run, FX)
    assert found["lines"] == 15
    assert found["torch"] == {
        "version": "2.11.0+cu130",
        "from": "log",
        "line": 1,
        "named": {"2.11.0+cu130": 1},
    }
    [hazard] = found["hazards"]
    assert {k: hazard[k] for k in ("id", "sure", "covered", "applied", "count", "line")} == {
        "id": "fx_tracing_flag",
        "sure": True,
        "covered": True,
        "applied": None,
        "count": 1,
        "line": 4,
    }
    assert hazard["thread"] == "drafter-1"
    assert found["unknown"] == []


def test_nothing_found(run: Run) -> None:
    assert run("step 1\nstep 2\n")[0] == 0
    status, out = run("")
    assert status == 0
    assert "0 lines" in out
    assert "no failure that is known, and no traceback" in out


def test_an_unknown_failure_is_told_and_not_guessed(run: Run) -> None:
    status, out = run('Traceback (most recent call last):\n  File "/a.py", line 3\nKeyError: 7\n')
    assert status == 1
    assert "unknown: 1 failure that no sign knows" in out
    assert "once, at line 1: KeyError: 7" in out


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("torch 2.11.0", "2.11.0"),
        ("torch==2.11.0+cu130", "2.11.0+cu130"),
        ("PyTorch version: 2.11.0+cu130", "2.11.0+cu130"),
        ("PyTorch 2.14.0a0+gitd0f2af8", "2.14.0a0+gitd0f2af8"),
        ("INFO using torch: 2.15.0.dev20260901+cu130", "2.15.0.dev20260901+cu130"),
        ("torch.__version__ = '2.9.1'", "2.9.1"),
        ('{"torch": "2.10.0", "cuda": "13.0"}', "2.10.0"),
        ("torch_version=2.13.0,", "2.13.0"),
        ('  File "/opt/torch-2.11.0+cpu/lib/x.py", line 3, in f', "2.11.0+cpu"),
        ("Requirement already satisfied: torch==2.8.0 in /venv", "2.8.0"),
        ("built with torch 2.9.0.", "2.9.0"),
        ("torch>=2.6", None),
        ("torchvision 0.20.1, torchaudio==2.5.0", None),
        ("xformers 0.0.33 requires torch==2.9.0, ", None),
        ("torch 2.5x faster, torch 2.5 times, torch 2.5 s", None),
        ("my-torch 2.11.0", None),
        ("flash_torch-2.11.0", None),
        ("torch 13.0", None),
    ],
)
def test_which_torch(line: str, version: str | None) -> None:
    context = Context(frozenset())
    context.look(1, line)
    assert context.version == version


def test_the_version_named_most_often(run: Run) -> None:
    found = findings(run, "xformers requires torch==2.9.0\ntorch 2.11.0\ntorch==2.13.0\n")
    assert found["torch"]["named"] == {"2.11.0": 1, "2.13.0": 1}
    out = run("torch 2.9.0\ntorch 2.13.0\ntorch 2.13.0\n")[1]
    assert "torch 2.13.0, named in line 2 (it also names 2.9.0)" in out


def test_without_a_version_the_installed_torch_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FX.replace("torch 2.11.0+cu130, ", "")
    monkeypatch.setattr(explain, "find_build", lambda: None)
    found = findings(run, text)
    assert found["torch"]["from"] == "installed"
    assert found["hazards"][0]["covered"] is False
    assert "the log does not say which torch, and none is installed" in run(text)[1]
    monkeypatch.undo()
    monkeypatch.setattr(explain, "find_build", lambda: explain.TorchBuild.of("2.12.1"))
    assert "patch fx_tracing_flag mends it in torch 2.12.1" in run(text)[1]
    assert "the log does not say which torch, judged for the installed 2.12.1" in run(text)[1]


def test_a_torch_that_should_have_it_fixed(run: Run) -> None:
    out = run(FX.replace("2.11.0+cu130", "2.14.1"))[1]
    assert "torch 2.14.1 should have it fixed (since 2.14)" in out
    assert "with that torch says what it has" in out


def test_what_only_may_be_needs_a_torch_that_is_affected(run: Run) -> None:
    text = (LOGS / "config_inherit.log").read_text()
    assert [h["id"] for h in findings(run, text)["hazards"]] == [
        "recompile_budget",
        "config_inherit",
        "recompile_limit",
    ]
    older = findings(run, text.replace("2.13.0+cpu", "2.11.0"))
    assert [h["id"] for h in older["hazards"]] == ["recompile_budget", "recompile_limit"]
    assert older["unknown"] == []


TABLE = """torch 2.11.0 (release), Python 3.11.7
mode = on (default)
disable = none (default)

patch            state         reason
fx_tracing_flag  {state}  {reason}
fx_patcher       applied       torch.fx._symbolic_trace is as the patch knows it
"""


@pytest.mark.parametrize(
    ("report", "applied", "words"),
    [
        (TABLE.format(state="applied", reason="found"), True, "the log says applied (found), line"),
        (
            TABLE.format(state="drifted", reason="x is new"),
            False,
            "the log says drifted (x is new)",
        ),
        (
            "WARNING:torchcompat:not applied: a b: c; fx_tracing_flag failed: OSError: x",
            False,
            "failed",
        ),
        (
            "torchcompat.PatchNotApplied: patch 'fx_tracing_flag' is disabled: disabled by env",
            False,
            "the log says disabled (disabled by env)",
        ),
        (
            '{\n  "patch": "fx_tracing_flag",\n  "state": "applied",\n}',
            True,
            "the log says applied",
        ),
        ("mode = off (TORCHCOMPAT)", False, "torchcompat was switched off (line 1)"),
        (
            TABLE.format(state="applied", reason="f").replace("fx_tracing_flag", "make_fx_tracer "),
            False,
            "torchcompat's report in the log does not have it",
        ),
        (
            '  File "/v/torchcompat/patches/fx_patcher.py", line 3, in f',
            None,
            "was at work (line 1)",
        ),
        ("fx_tracing_flag  applied  yesterday", None, "does not say whether"),
    ],
)
def test_whether_it_was_applied(run: Run, report: str, applied: bool | None, words: str) -> None:
    [hazard] = findings(run, f"{report}\n{FX}")["hazards"]
    assert hazard["applied"] is applied
    assert words in hazard["application"]
    if applied:
        assert "it should not have happened" in hazard["next"]


def test_the_latest_report_counts() -> None:
    context = Context(frozenset({"p"}))
    for number, line in enumerate(["patch  state  reason", "p      pending", "p      applied"], 1):
        context.look(number, line)
    assert context.stood["p"].state is State.APPLIED
    assert context.stood["p"].number == 3


def test_our_own_report_is_understood(run: Run) -> None:
    """What `print(torchcompat.apply())` and its JSON look like is not written down twice."""
    import torchcompat

    report = torchcompat.plan()
    first = report.verdicts[0].patch_id
    for text in (str(report), report.to_json()):
        found = findings(run, f"{text}\n{FX}")
        assert found["report"][first] == report.verdicts[0].state.value
        assert len(found["report"]) == len(report)


def test_gzip(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    data = gzip.compress(FX.encode())
    assert findings(run, data, name="train.log.gz")["hazards"][0]["id"] == "fx_tracing_flag"
    assert cli.main(["explain", str(LOGS / "fx_tracing_flag.log")]) == 1
    capsys.readouterr()
    assert run(b"no gzip at all", name="plain.log.gz")[0] == 2
    assert cli.main(["explain", str(LOGS / "none.log.gz")]) == 2
    whole = gzip.compress((FX + "".join(map(str, range(300_000)))).encode())
    status, out = run(whole[: len(whole) // 2], name="cut.log.gz")  # the job was killed
    assert status == 1
    assert "cannot be read to its end" in out
    assert "fx_tracing_flag: " in out


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Piped:
        buffer = io.BytesIO(FX.encode())

        @staticmethod
        def isatty() -> bool:
            return False

    for arguments in (["-"], []):
        monkeypatch.setattr(sys, "stdin", Piped)
        Piped.buffer = io.BytesIO(FX.encode())
        assert cli.main(["explain", *arguments]) == 1
        assert capsys.readouterr().out.startswith("standard input: 15 lines")


def test_neither_a_log_nor_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "fx_tracing_flog"]) == 2
    assert "did you mean 'fx_tracing_flag'?" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "a folder" in capsys.readouterr().err

    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal)
    assert cli.main(["explain"]) == 2
    assert "give a patch's id, a log file" in capsys.readouterr().err


def test_an_id_goes_before_a_file_of_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fx_patcher").write_text("nothing")
    cli.main(["explain", "fx_patcher"])
    assert "verdict here" in capsys.readouterr().out


def test_a_hazard_without_a_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "cuda_build_without_gpu"]) == 0
    assert "There is no patch for it yet. torch 2.12 has it fixed" in capsys.readouterr().out
    assert cli.main(["explain", "cuda_build_without_gpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["patch"] is None
    cli.main(["explain", str(LOGS / "cuda_build_without_gpu.log")])
    out = capsys.readouterr().out
    assert "there is no patch for it yet" in out
    assert "next: torch 2.12 has it fixed. Before: make the first compile in the main thread" in out


def test_a_sign_that_is_no_regular_expression_is_named_and_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Sign(text="a long enough text ("), Sign(text="another long text")
    signs = Signs([Known("acme:p", "title", (bad, good))])
    assert signs.loose == ("another long text",)
    assert "acme:p: sign 'a long enough text (': no regular expression" in caplog.text


def test_a_plugins_signs_and_hazards(
    monkeypatch: pytest.MonkeyPatch, patch_of: Any, wrap: Any
) -> None:
    sign, more = Sign(text="the plugin's own message"), Sign(text="another long message")
    patch = patch_of(wrap(), id="acme:p", signs=(sign,))
    registered = {"acme:p": Registered(patch, "acme 1.2", "acme")}
    module = type(sys)("acme")
    monkeypatch.setitem(sys.modules, "acme", module)
    assert known_hazards(registered)["acme:p"].signs == (sign,)
    hazards = [Hazard(id=i, title="t", advice="a", signs=(more,)) for i in ("acme:p", "acme:h")]
    module.HAZARDS = hazards  # type: ignore[attr-defined]
    known = known_hazards(registered)
    assert known["acme:p"].signs == (sign, more)
    assert known["acme:p"].patch is patch
    assert known["acme:h"].patch is None
    module.HAZARDS = ["text"]  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match=r"acme\.HAZARDS"):
        known_hazards(registered)


MEASURE = """
import sys, resource
sys.path.insert(0, {root!r})
from torchcompat.engine import ENGINE
from torchcompat.logs.read import read_blocks
from torchcompat.logs.signs import known_hazards

known = known_hazards(ENGINE.catalog().patches)
failure = open({log!r}, "rb").read()
steps = b"".join(
    b"[rank%d]: 2026-11-30 14:02:07,101 INFO trainer: step %d loss 1.2 lr 3e-4\\n" % (i % 8, i)
    for i in range(4000)
)
endless = b"y" * (1 << 18)  # one line without an end

failures = 0

def blocks():
    global failures
    size = count = 0
    while size < {size}:
        yield steps
        size += len(steps)
        if count % 20 == 0:
            failures += 1
            yield failure
        count += 1
    yield from [endless] * 40

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
found = read_blocks(known, blocks())
print(found.hazards["fx_tracing_flag"].count, failures, (peak() - before) // 1024)
"""


@pytest.mark.parametrize(
    "megabytes", [20, pytest.param(200, marks=pytest.mark.slow)], ids=["20MB", "200MB"]
)
def test_a_long_log_in_bounded_memory(tmp_path: Path, megabytes: int) -> None:
    code = MEASURE.format(
        root=str(ROOT), log=str(LOGS / "fx_tracing_flag.log"), size=megabytes * 1_000_000
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=True,
    )
    count, failures, grown = map(int, done.stdout.split())
    assert count == failures > 0
    assert grown < 16  # MB


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    from torchcompat.logs.lines import blocks

    log = tmp_path / "x"
    log.write_bytes(b"a" * 3_000_000 + b"\nend\n")
    with log.open("rb") as stream:
        sizes = [len(block) for block in blocks(stream, "x")]
    assert sum(sizes) < 700_000
