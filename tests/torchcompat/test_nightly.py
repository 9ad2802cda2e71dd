""".ci/nightly.py: where torch comes from, and what changed against the newest release."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "nightly.py"
NIGHTLY = "2.16.0.dev20261201+cpu"


@pytest.fixture
def nightly() -> Any:
    spec = importlib.util.spec_from_file_location("nightly_of_a_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def wheel(folder: Path, version: str) -> Path:
    """A tiny torch."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torch/__init__.py", "")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def index(folder: Path, *versions: str) -> str:
    """A simple index with torch of these versions; its address."""
    links = [wheel(folder / "torch", v).name for v in versions]
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    text = "".join(f'<a href="{n.replace("+", "%2B")}">{n}</a>' for n in links)
    (folder / "torch" / "index.html").write_text(text)
    return folder.as_uri()


@pytest.fixture
def installed(nightly: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be installed; the looking for it is pip's own."""
    real, asked = nightly.pip, []

    def pip(arguments: list[str], environ: dict[str, str]) -> Any:
        if arguments[0] != "install":
            return real(arguments, environ)
        asked.extend(Path(a).name for a in arguments if a.endswith((".whl", "]")))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(nightly, "pip", pip)
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("TORCH_WHEELS", "TORCH_NIGHTLY_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_the_newest_nightly_is_taken_from_the_index_alone(
    nightly: Any, installed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = index(tmp_path / "nightlies", "2.16.0.dev20261130+cpu", NIGHTLY)
    monkeypatch.setenv("TORCH_NIGHTLY_INDEX", address)
    # A release that sorts after every nightly of its number, where pip looks by itself.
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index(tmp_path / "releases", "2.16.0"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel(tmp_path / "wheels", "2.17.0").parent))
    assert nightly.install() == 0
    assert installed[0] == f"torch-{NIGHTLY}-py3-none-any.whl"
    assert installed[1].endswith("[dflash,test]")


def test_a_folder_of_wheels_comes_before_the_index(
    nightly: Any, installed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NIGHTLY_INDEX", index(tmp_path / "nightlies", "2.16.0.dev20261130"))
    monkeypatch.setenv("TORCH_WHEELS", str(wheel(tmp_path / "wheels", NIGHTLY).parent))
    assert nightly.install() == 0
    assert installed[0] == f"torch-{NIGHTLY}-py3-none-any.whl"


@pytest.mark.parametrize("variable", ["TORCH_NIGHTLY_INDEX", "TORCH_WHEELS"])
def test_without_an_index_that_answers_there_is_one_sentence(
    nightly: Any,
    installed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variable: str,
) -> None:
    place = str(tmp_path / "nothing")
    # Nobody listens on port 9 of this machine.
    monkeypatch.setenv(variable, place if "WHEELS" in variable else "http://127.0.0.1:9/simple")
    assert nightly.install() == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("no nightly of torch to be had from ")
    assert "set TORCH_NIGHTLY_INDEX to an index that answers, or TORCH_WHEELS" in err
    assert not installed


def proof(patch: str, outcome: str) -> dict[str, Any]:
    run = {"status": 0, "text": f"said of {patch}", "seconds": 1.0}
    return {"patch": patch, "outcome": outcome, "unpatched": run, "patched": run}


RESULTS = {
    "2.9.1+cpu, Python 3.11": {"old": "fixed by us"},
    "2.15.0+cu130, Python 3.13": {"old": "fixed by us"},
    "2.15.0+cpu, Python 3.11": {
        "same": "fixed by us",
        "mended": "fixed by us",
        "gone": "fixed by us",
    },
}
PROOFS = [
    proof("same", "fixed by us"),
    proof("mended", "fixed upstream"),
    proof("added", "bug present"),
]


def test_the_newest_release_of_this_python_is_what_counts(nightly: Any) -> None:
    assert nightly.newest_release(RESULTS, "3.11")[0] == "2.15.0+cpu, Python 3.11"
    assert nightly.newest_release(RESULTS, "3.13")[0] == "2.15.0+cu130, Python 3.13"
    with pytest.raises(LookupError, match="make_hazards"):
        nightly.newest_release({}, "3.11")


def faked(plan: dict[str, Any], tests: tuple[int, str], proofs: list[dict[str, Any]]) -> Any:
    def run(arguments: list[str]) -> Any:
        if "pytest" in arguments:
            return subprocess.CompletedProcess(arguments, tests[0], tests[1], "")
        text = json.dumps(plan if "plan" in arguments else {"proofs": proofs})
        return subprocess.CompletedProcess(arguments, 0, text, "")

    return run


def plan(version: str = NIGHTLY, channel: str = "nightly", **states: str) -> dict[str, Any]:
    patches = [{"patch": p, "state": s, "reason": "because"} for p, s in states.items()]
    torch = {"version": version, "channel": channel, "git": "cafe1234cafe1234"}
    return {"torch": torch, "python": "3.11.7", "patches": patches}


@pytest.fixture
def releases(nightly: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hazards.json"
    path.write_text(json.dumps(RESULTS))
    monkeypatch.setattr(nightly, "RELEASES", path)


def report(nightly: Any, monkeypatch: pytest.MonkeyPatch, run: Any, *arguments: str) -> int:
    monkeypatch.setattr(nightly, "run", run)
    monkeypatch.setattr(sys, "argv", ["nightly.py", "report", *arguments])
    status: int = nightly.main()
    return status


def test_the_report_says_what_changed_and_what_is_wrong(
    nightly: Any,
    releases: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tests = (1, "FAILED tests/x.py::test_y - AssertionError\n1 failed, 7 passed in 3.0s\n")
    run = faked(plan(same="ok", mended="fixed", added="drifted"), tests, PROOFS)
    file = tmp_path / "report.json"
    assert report(nightly, monkeypatch, run, "--output", str(file), "--", "-k", "y") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"torch {NIGHTLY} (nightly, git cafe1234ca), Python 3.11.7, "
        "against 2.15.0+cpu, Python 3.11",
        "proofs: 3, changed: 3",
        "  mended: fixed by us -> fixed upstream  said of mended",
        "  added: not proved -> bug present  said of added",
        "  gone: fixed by us -> no such patch",
        "verdicts to look at: 1",
        "  added is drifted: because",
        "tests: 1 failed, 7 passed in 3.0s",
        "  tests/x.py::test_y",
    ]
    assert json.loads(file.read_text())["release"] == "2.15.0+cpu, Python 3.11"


def test_a_clean_report_and_one_on_a_release(
    nightly: Any,
    releases: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = faked(plan(same="ok"), (0, "8 passed\n"), PROOFS[:2])
    assert report(nightly, monkeypatch, run) == 0  # what is mended upstream is good news
    assert "this is no nightly" not in capsys.readouterr().out
    run = faked(plan("2.15.0+cpu", "release", same="ok"), (0, "8 passed\n"), PROOFS[:2])
    assert report(nightly, monkeypatch, run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["tests"]["summary"] == "8 passed"
    assert report(nightly, monkeypatch, run) == 0
    assert "this is no nightly" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["tests", "proof", "verdict"])
def test_each_kind_of_finding_fails_the_report(
    nightly: Any, releases: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = faked(
        plan(same="missing" if what == "verdict" else "ok"),
        (1 if what == "tests" else 0, "8 passed\n"),
        PROOFS if what == "proof" else PROOFS[:2],
    )
    assert report(nightly, monkeypatch, run) == 1


def test_without_torch_or_with_a_torch_that_does_not_import_it_says_so(
    nightly: Any,
    releases: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(nightly, monkeypatch, faked({**plan(), "torch": None}, (0, ""), [])) == 2
    assert "run `python .ci/nightly.py install` first" in capsys.readouterr().err

    def broken(arguments: list[str]) -> Any:
        return subprocess.CompletedProcess(arguments, 1, "", "ImportError: no such symbol\n")

    assert report(nightly, monkeypatch, broken) == 2
    err = capsys.readouterr().err
    assert err == "torchcompat plan gave no result: ImportError: no such symbol\n"
