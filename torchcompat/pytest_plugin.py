"""pytest and torchcompat: markers and a fixture for patches, checks of the patches, leaks.

    @pytest.mark.torchcompat_torch(">=2.11,<2.14")       skipped on another torch
    @pytest.mark.torchcompat_patches("fx_patcher")       with these patches (all, without names)
    @pytest.mark.torchcompat_patches(on=False)           without any

    pytest --torchcompat-check    an item for each patch: does it still fit, is it still needed
    pytest --torchcompat-leaks    a test that leaves torch changed is an error

pytest loads this in every run where the package is installed, so it imports nothing but pytest, and
does nothing where none of it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from torchcompat.build import TorchBuild
    from torchcompat.report import Report

TORCH: Final = "torchcompat_torch"
PATCHES: Final = "torchcompat_patches"
_MARKERS: Final = (
    f"{TORCH}(bounds): skip unless torch's version is in bounds such as '>=2.11,<2.14'; a bound "
    "counts from the first nightly of its version on",
    f"{PATCHES}(*ids, on=True): run with (on=False: without) the patches named, or all",
)
_STATE: Final = pytest.StashKey["PatchState"]()

pytest.register_assert_rewrite("torchcompat.testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchcompat")
    group.addoption(
        "--torchcompat-check",
        action="store_true",
        help="also check every patch: does it fit this torch, is it still needed",
    )
    group.addoption(
        "--torchcompat-leaks",
        action="store_true",
        help="a test that leaves patches, hooks on nn.Module or tracing flags behind is an error",
    )
    parser.addini("torchcompat_leaks", "as --torchcompat-leaks", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if config.getoption("torchcompat_leaks") or config.getini("torchcompat_leaks"):
        config.pluginmanager.register(LeakCheck(), "torchcompat-leaks")


def pytest_report_header(config: pytest.Config) -> str | None:
    """The torch that the tests run on. Whatever is wrong with it is no reason to stop pytest."""
    try:
        build = _build()
        return (
            None if build is None else f"torchcompat: {build}, patches applied: {_count_applied()}"
        )
    except Exception as e:  # noqa: BLE001 - a header must not end other people's runs
        return f"torchcompat: {type(e).__name__}: {e}"


def _build() -> TorchBuild | None:
    from torchcompat.build import find_build

    return find_build()


def _count_applied() -> int:
    engine = sys.modules.get("torchcompat.engine")
    if engine is None or not engine.ENGINE.active():
        return 0
    from torchcompat.api import status
    from torchcompat.verdict import State

    return sum(verdict.state is State.APPLIED for verdict in status())


# -- markers


def bounds_of(text: str) -> str:
    """What `torchcompat.build.parse_bounds` reads: "<2.14" ends before 2.14's first nightly."""
    parts = [part.strip() for part in text.split(",")]
    return ",".join(part if ".dev" in part else f"{part}.dev0" for part in parts)


def outside(marker: pytest.Mark) -> str | None:
    """Why a test with this marker is to be skipped. Raises `ValueError` for no bounds."""
    from torchcompat.build import parse_bounds

    if len(marker.args) != 1 or marker.kwargs or not isinstance(marker.args[0], str):
        raise ValueError(f"{TORCH} takes one text such as '>=2.11,<2.14'")
    bounds = bounds_of(marker.args[0])
    parse_bounds(bounds)
    build = _build()
    if build is None:
        return "torch is not installed"
    if build.place(bounds) == "inside":
        return None
    return f"torch {build.version} is outside {marker.args[0]}"


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items:
        for marker in item.iter_markers(TORCH):
            try:
                reason = outside(marker)
            except ValueError as e:
                raise pytest.UsageError(f"{item.nodeid}: marker {TORCH}: {e}") from None
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
                break
        for marker in item.iter_markers(PATCHES):
            _read_patches_marker(item, marker)


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_torchcompat_checks(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Before -k and -m choose among the items."""
    if config.getoption("torchcompat_check"):
        checks = PatchChecks.from_parent(session, name="torchcompat", nodeid="torchcompat")
        items.extend(session.genitems(checks))


def _read_patches_marker(item: pytest.Item, marker: pytest.Mark) -> tuple[tuple[str, ...], bool]:
    """The patches named and whether they are to be on. Raises `pytest.UsageError`."""
    on = marker.kwargs.get("on", True)
    if set(marker.kwargs) - {"on"} or not isinstance(on, bool):
        raise pytest.UsageError(f"{item.nodeid}: marker {PATCHES} takes ids and on=True or False")
    if not all(isinstance(i, str) for i in marker.args):
        raise pytest.UsageError(f"{item.nodeid}: marker {PATCHES} takes ids, not {marker.args!r}")
    return tuple(marker.args), on


class PatchState:
    """Patches on or off for one test; `restore` brings back those that were applied before."""

    def __init__(self) -> None:
        from torchcompat.engine import ENGINE

        self._engine = ENGINE
        self._before = ENGINE.active()

    def on(self, *ids: str) -> Report:
        """Apply the patches named, or all that this torch needs.

        Raises `PatchNotApplied` for one that is named and does not fit, `ConfigError` for no patch.
        Skips the test where TORCHCOMPAT=off forbids it.
        """
        import torchcompat

        report = torchcompat.apply(only=list(ids) or None)
        if report.settings.mode == "off":
            pytest.skip(f"patches are switched off by {report.settings.where('mode')}")
        return report

    def off(self, *ids: str) -> Report:
        """Take away the patches named, or all."""
        import torchcompat

        return torchcompat.unapply(list(ids) or None)

    def restore(self) -> None:
        import torchcompat

        now = self._engine.active()
        torchcompat.unapply(sorted(now - self._before))
        if missing := sorted(self._before - now):
            torchcompat.apply(only=missing)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker(PATCHES)
    if marker is None:
        return
    ids, on = _read_patches_marker(item, marker)
    item.stash[_STATE] = state = PatchState()
    (state.on if on else state.off)(*ids)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:
        state = item.stash.get(_STATE, None)
        if state is not None:
            del item.stash[_STATE]
            state.restore()


@pytest.fixture
def torchcompat_patches() -> Iterator[PatchState]:
    """Patches on and off inside a test: `torchcompat_patches.on("fx_patcher")`, `.off()`. As it was
    afterwards."""
    state = PatchState()
    yield state
    state.restore()


# -- leaks


class LeakCheck:
    """Registered where leaks are asked for, so that other runs have no fixture of ours."""

    @pytest.fixture(autouse=True)
    def _torchcompat_leaks(self) -> Iterator[None]:
        """Begins after the fixtures of wider scope, whose changes are theirs, and ends last."""
        from torchcompat.leaks import left_since, snapshot

        before = snapshot()
        yield
        left = left_since(before)
        if left:
            pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


# -- checks


class PatchChecks(pytest.Collector):
    """`torchcompat::drift[id]` and `torchcompat::still-needed[id]` for every patch."""

    report: Report

    def collect(self) -> Sequence[PatchCheck]:
        from torchcompat.errors import ConfigError
        from torchcompat.prove import fresh_plan

        try:
            self.report = fresh_plan()
        except ConfigError as e:
            raise pytest.UsageError(f"--torchcompat-check: {e}") from None
        names: list[tuple[type[PatchCheck], str]] = [(DriftCheck, v.patch_id) for v in self.report]
        names += [(NeedCheck, patch_id) for _, patch_id in names if _has_program(patch_id)]
        return [
            cls.from_parent(self, name=f"{cls.title}[{patch_id}]", patch_id=patch_id)
            for cls, patch_id in names
        ]


def _has_program(patch_id: str) -> bool:
    from torchcompat.engine import ENGINE
    from torchcompat.errors import ConfigError

    try:
        return ENGINE.registered(patch_id).patch.repro is not None
    except ConfigError:  # the verdict on a plugin that does not load is about no patch
        return False


class PatchCheck(pytest.Item):
    """One question about one patch."""

    title = ""

    def __init__(self, *, patch_id: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.patch_id = patch_id

    @property
    def plan(self) -> Report:
        assert isinstance(self.parent, PatchChecks)
        return self.parent.report

    def reportinfo(self) -> tuple[str, None, str]:
        return "torchcompat", None, f"torchcompat::{self.name}"


class DriftCheck(PatchCheck):
    """Does the patch fit this torch, or know why it need not?"""

    title = "drift"

    def runtest(self) -> None:
        from torchcompat.verdict import FINDINGS, State

        verdict = self.plan[self.patch_id]
        text = f"{self.patch_id} is {verdict.state}: {verdict.reason}"
        if verdict.state in FINDINGS:
            pytest.fail(text, pytrace=False)
        if verdict.state in (State.DISABLED, State.PENDING):
            pytest.skip(text)


class NeedCheck(PatchCheck):
    """Does the patch's own program still show the fault without the patch?"""

    title = "still-needed"

    def runtest(self) -> None:
        from torchcompat.engine import ENGINE
        from torchcompat.prove import prove
        from torchcompat.verdict import State

        verdict = self.plan[self.patch_id]
        if verdict.state not in (State.OK, State.APPLIED):
            pytest.skip(f"{self.patch_id} is {verdict.state}: {verdict.reason}")
        run = prove(ENGINE.registered(self.patch_id), unpatched_only=True).unpatched
        if run.status == 2:
            pytest.skip(run.text)
        if run.status == 0:
            pytest.fail(
                f"{self.patch_id} is not needed any more on this torch: its program shows no fault "
                f"without it ({run.text}). Narrow `affects`, or say what makes it fixed.",
                pytrace=False,
            )
