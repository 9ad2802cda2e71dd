"""Every verdict and the order in which they win, on every kind of build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchcompat import Finding, State, Verdict
from torchcompat.build import TorchBuild
from torchcompat.config import Settings
from torchcompat.judge import disabled_by, judge

Make = Callable[..., Any]

RELEASE, NIGHTLY = "2.14.1+cpu", "2.15.0.dev20260715"
VENDOR, SOURCE = "2.15.0a0+nv26.10", "2.15.0a0+gitabc"
UP_TO_213 = ">=2.6.0.dev0,<2.14.0.dev0"


def decide(patch: Any, version: str = "2.13.0", ready: bool = True, **fields: Any) -> Verdict:
    standing = fields.pop("standing", {})
    return judge(patch, TorchBuild.of(version), standing, lambda _: ready, **fields)


@pytest.fixture
def fitting(leaf: Any, wrap: Make, patch_of: Make) -> Make:
    """Makes a patch whose edit fits the library."""
    return lambda **fields: patch_of(wrap(), **fields)


def test_ok_with_evidence(lib: Any, fitting: Make) -> None:
    verdict = decide(fitting())
    assert (verdict.state, verdict.evidence) == (State.OK, (f"found {lib.target('compute')}",))


def test_no_torch(fitting: Make) -> None:
    assert judge(fitting(), None, {}, lambda _: True).state is State.MISSING


@pytest.mark.parametrize("version", ["2.5.1", "2.5.0.dev20240101", "2.5.0a0+nv24"])
def test_below_the_bounds_is_final_everywhere(fitting: Make, version: str) -> None:
    verdict = decide(fitting(affects=UP_TO_213), version)
    assert verdict.state is State.NOT_AFFECTED
    assert "older than the fault" in verdict.reason


@pytest.mark.parametrize("version", [RELEASE, "2.14.0rc1"])
def test_above_the_bounds_is_final_on_releases(fitting: Make, version: str) -> None:
    fixed = decide(fitting(affects=UP_TO_213, fixed_in="2.14"), version)
    assert (fixed.state, fixed.reason) == (State.FIXED, "fixed in torch 2.14")
    assert decide(fitting(affects=UP_TO_213), version).state is State.NOT_AFFECTED


@pytest.mark.parametrize("version", [NIGHTLY, VENDOR, SOURCE, "odd version"])
def test_above_the_bounds_the_code_decides_elsewhere(
    fitting: Make, wrap: Make, patch_of: Make, version: str
) -> None:
    assert decide(fitting(affects=UP_TO_213, fixed_in="2.14"), version).state is State.OK
    if version != "odd version":  # gone or changed past the bound: that is the fix
        for edit in (wrap("gone"), wrap(signature=("other",))):
            patch = patch_of(edit, affects=UP_TO_213, fixed_in="2.14")
            assert decide(patch, version).state is State.FIXED
            patch = patch_of(edit, affects=UP_TO_213)
            assert decide(patch, version).state is State.NOT_AFFECTED


@pytest.mark.parametrize("version", ["2.13.0", NIGHTLY, VENDOR])
def test_inside_the_bounds_what_does_not_fit_is_a_finding(
    leaf: Any, wrap: Make, patch_of: Make, version: str
) -> None:
    assert decide(patch_of(wrap("gone")), version).state is State.MISSING
    assert decide(patch_of(wrap(signature=("other",))), version).state is State.DRIFTED
    both = patch_of(wrap(signature=("other",)), wrap("gone"))
    assert decide(both, version).state is State.MISSING


def test_the_probe_has_the_first_word(leaf: Any, wrap: Make, patch_of: Make) -> None:
    fixed = lambda: Finding("fixed", "per thread here", ("saw it",))  # noqa: E731
    verdict = decide(patch_of(wrap("gone"), recognise=fixed))
    assert (verdict.state, verdict.reason) == (State.FIXED, "per thread here")
    assert verdict.evidence == ("saw it",)


def test_a_probe_that_breaks(leaf: Any, wrap: Make, patch_of: Make) -> None:
    def probe() -> Finding:
        raise KeyError("torch.nn")

    verdict = decide(patch_of(wrap(), recognise=probe))
    assert (verdict.state, verdict.reason) == (State.FAILED, "KeyError: 'torch.nn'")


def test_pending_and_a_module_that_can_never_come(lib: Any, wrap: Make, patch_of: Make) -> None:
    assert decide(patch_of(wrap()), ready=False).state is State.PENDING
    nowhere = patch_of(wrap(target=f"{lib.name}.nowhere:f"))
    assert decide(nowhere, ready=False).state is State.PENDING, "the package is not imported"
    lib.load()
    verdict = decide(nowhere, ready=False)
    assert (verdict.state, f"{lib.name}.nowhere does not exist" in verdict.reason) == (
        State.MISSING,
        True,
    )


@pytest.mark.parametrize(
    ("standing", "state"),
    [
        ({"q": State.APPLIED}, State.OK),
        ({"q": State.OK}, State.OK),
        ({"q": State.FIXED}, State.OK),
        ({"q": State.NOT_AFFECTED}, State.OK),
        ({"q": State.PENDING}, State.PENDING),
        ({"q": State.DRIFTED}, State.BLOCKED),
        ({"q": State.DISABLED}, State.BLOCKED),
        ({}, State.BLOCKED),
    ],
)
def test_requires(fitting: Make, standing: dict[str, State], state: State) -> None:
    verdict = decide(fitting(requires=("q",)), standing=standing)
    assert verdict.state is state
    assert state is State.OK or "q" in verdict.reason


@pytest.mark.parametrize("held", [State.APPLIED, State.PENDING, State.OK])
def test_conflicts(fitting: Make, held: State) -> None:
    patch = fitting(conflicts=("q",), requires=("r",))
    assert decide(patch, standing={"q": held}).state is State.CONFLICT
    assert decide(patch, standing={"q": State.FIXED, "r": State.OK}).state is State.OK


def test_disabled_wins_over_all(fitting: Make) -> None:
    verdict = decide(fitting(affects=UP_TO_213), "2.5.0", disabled="because")
    assert (verdict.state, verdict.reason) == (State.DISABLED, "because")


def test_disabled_by(fitting: Make) -> None:
    env = {"mode": "TORCHCOMPAT", "disable": "TORCHCOMPAT_DISABLE", "only": "TORCHCOMPAT_ONLY"}
    off = Settings(mode="off", origin=env)
    without = Settings(disable=("p",), origin=env)
    others = Settings(only=("q",), origin=env)
    plain, opt_in = fitting(), fitting(opt_in=True)
    assert disabled_by(plain, Settings(), named=False) is None
    assert disabled_by(plain, off, named=True) == "switched off by TORCHCOMPAT"
    assert disabled_by(plain, without, named=True) == "disabled by TORCHCOMPAT_DISABLE"
    assert disabled_by(plain, others, named=False) == "not among the patches of TORCHCOMPAT_ONLY"
    assert disabled_by(plain, others, named=True) is None, "an argument outranks the environment"
    assert disabled_by(opt_in, Settings(), named=False) == "opt-in: applied only when named"
    assert disabled_by(opt_in, Settings(), named=True) is None
    assert disabled_by(opt_in, Settings(only=("p",)), named=False) is None
