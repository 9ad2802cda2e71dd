from __future__ import annotations

import json
from typing import Any

import pytest

from torchcompat import cli
from torchcompat.prove import Proof, Run


def proof(patch: str, outcome: str) -> Proof:
    return Proof(patch, outcome, Run(1, "the fault", 1.0), Run(0, "right", 2.0))


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked to be proved; nothing is run."""
    asked: list[str] = []

    def fake(registered: Any, *, at_once: int, tell: Any) -> list[Proof]:
        asked.extend(r.patch.id for r in registered)
        outcome = "bug present" if "fx_tracing_flag" in asked else "fixed by us"
        found = [proof(r.patch.id, outcome) for r in registered]
        for one in found:
            tell(one)
        return found

    monkeypatch.setattr(cli, "prove_all", fake)
    return asked


def test_status_is_clean_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "fx_patcher" in out
    assert out.startswith("torch ")
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clean"] is True


def test_plan_is_the_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"]) == 0
    assert capsys.readouterr().out.startswith("patch ")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "fx_patcher"]) == 0
    assert "verdict here" in capsys.readouterr().out
    assert cli.main(["explain", "fx_patchr"]) == 2
    assert "fx_patcher" in capsys.readouterr().err


def test_prove_all_or_some(proofs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", "fx_patcher", "make_fx_tracer"]) == 0
    assert proofs == ["fx_patcher", "make_fx_tracer"]
    out = capsys.readouterr().out
    assert "fx_patcher      fixed by us              3.0 s  the fault" in out
    assert "2 fixed by us" in out
    assert cli.main(["prove"]) == 1  # one of all is a finding
    assert {"fx_tracing_flag", "fx_patcher", "is_compiling_flag"} <= set(proofs)
    assert cli.main(["prove", "nonsense"]) == 2


def test_prove_as_json(proofs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prove", "fx_patcher", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"]["version"]
    assert [p["outcome"] for p in found["proofs"]] == ["fixed by us"]


def test_repro_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        cli, "prove", lambda registered, unpatched_only: proof(registered.patch.id, "fixed by us")
    )
    assert cli.main(["repro", "fx_patcher"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "without the patch: the fault",
        "with the patch:    right",
        "fx_patcher: fixed by us",
    ]


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
