"""Proofs: what the runs of a patch's program come to, and how a run is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchcompat import prove as prove_module
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError
from torchcompat.prove import Proof, Run, prove, prove_all


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("print('first'); print('right')", 0, "right"),
        ("print('the fault'); raise SystemExit(1)", 1, "the fault"),
        ("print('not here'); raise SystemExit(2)", 2, "not here"),
        ("raise SystemExit(0)", 0, "ended with status 0; no output"),
        ("print('a'); raise SystemExit(7)", 1, "ended with status 7; no output"),
        ("import os; os.abort()", 1, "ended with status -6"),
        ("raise ValueError('odd')", 1, "ended with status 1; ValueError: odd"),
    ],
)
def test_a_run_is_judged_by_status_and_last_line(
    tmp_path: Path, text: str, status: int, said: str
) -> None:
    found = prove_module._run(program(tmp_path, text), patched=False)
    assert found.status == status
    assert found.text.startswith(said)
    assert found.seconds < 60


def test_a_hang_is_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_module, "TIMEOUT_S", 1)
    found = prove_module._run(program(tmp_path, "import time; time.sleep(60)"), patched=False)
    assert (found.status, found.text) == (1, "no end after 1 s")


def test_a_run_is_told_whether_to_patch_and_nothing_of_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHCOMPAT", "off")
    text = "import os; print(os.environ['TORCHCOMPAT_REPRO_APPLY'], os.environ.get('TORCHCOMPAT'))"
    path = program(tmp_path, text)
    assert prove_module._run(path, patched=True).text == "1 None"
    assert prove_module._run(path, patched=False).text == "0 None"


@pytest.mark.parametrize(
    ("without", "patched", "outcome", "finding"),
    [
        (1, 0, "fixed by us", False),
        (1, 1, "bug present", True),
        (1, 2, "bug present", True),
        (0, 1, "broken by us", True),
        (0, 0, "not reproducible here", False),
        (2, None, "not reproducible here", False),
    ],
)
def test_outcomes(
    monkeypatch: pytest.MonkeyPatch,
    without: int,
    patched: int | None,
    outcome: str,
    finding: bool,
) -> None:
    statuses = {False: without, True: patched}
    monkeypatch.setattr(
        prove_module, "_run", lambda path, patched: Run(int(statuses[patched] or 0), "said", 0.5)
    )
    monkeypatch.setattr(prove_module, "fresh_plan", dict)
    if without == 0:
        monkeypatch.setattr(prove_module, "fresh_plan", lambda: {"fx_patcher": _Verdict()})
    proof = prove(ENGINE.registered("fx_patcher"))
    assert (proof.outcome, proof.is_finding) == (outcome, finding)
    assert (proof.patched is None) == (patched is None)
    assert proof.to_dict()["unpatched"]["text"] == "said"


class _Verdict:
    state = None


def test_proofs_come_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(registered: Any) -> Proof:
        return Proof(registered.patch.id, "fixed by us", Run(1, "x", 0.1), Run(0, "y", 0.1))

    monkeypatch.setattr(prove_module, "prove", fake)
    monkeypatch.setattr(prove_module, "fresh_plan", lambda: None)
    chosen = [ENGINE.registered(name) for name in ("fx_patcher", "fx_tracing_flag")]
    told: list[str] = []
    proofs = prove_all(chosen, at_once=2, tell=lambda proof: told.append(proof.patch))
    assert [proof.patch for proof in proofs] == told == ["fx_patcher", "fx_tracing_flag"]


def test_a_patch_without_a_program_is_a_clear_error(patch_of: Any, wrap: Any) -> None:
    class Registered:
        patch = patch_of(wrap())

    with pytest.raises(ConfigError, match="brings no reproducer"):
        prove(Registered())  # type: ignore[arg-type]


def test_every_patch_of_ours_brings_a_program_that_is_there() -> None:
    from importlib import resources

    for patch_id in (v.patch_id for v in ENGINE.plan(None)):
        registered = ENGINE.registered(patch_id)
        assert registered.patch.repro, patch_id
        assert resources.files(registered.package).joinpath(registered.patch.repro).is_file()
