"""Decide on one patch. Pure: looks at the version, the loaded modules and the other verdicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Final

from torchcompat.build import Place, TorchBuild
from torchcompat.config import Settings
from torchcompat.errors import PatchConflict, SourceDrift, TargetNotFound
from torchcompat.patch import Patch
from torchcompat.verdict import State, Verdict

_HOLDS: Final = frozenset({State.OK, State.APPLIED, State.PENDING, State.DISPLACED})
_SATISFIES: Final = frozenset({State.OK, State.APPLIED, State.FIXED, State.NOT_AFFECTED})


def judge(
    patch: Patch,
    build: TorchBuild | None,
    standing: Mapping[str, State],
    is_ready: Callable[[str], bool],
    disabled: str | None = None,
) -> Verdict:
    """The first that holds of: disabled, not affected, fixed, missing, drifted, conflict, blocked,
    ok. Pending where the modules that decide are not imported yet.

    `standing` has the state of every patch decided before this one; `disabled` is why the settings
    exclude the patch; `is_ready` tells whether a module is imported and its execution has ended.
    """
    if disabled is not None:
        return Verdict(patch.id, State.DISABLED, disabled)
    if build is None:
        return Verdict(patch.id, State.MISSING, "torch is not installed")
    place = build.place(patch.affects)
    by_version = _version_verdict(patch, build, place)
    if by_version is not None:
        return by_version
    waiting = [name for name in patch.modules if not is_ready(name)]
    gone = [name for name in waiting if _does_not_exist(name)]
    if gone:
        return _beyond(patch, build, place) or Verdict(
            patch.id, State.MISSING, f"{gone[0]} does not exist in {build}"
        )
    if not waiting:
        found = _look(patch)
        if found.state is not State.OK:
            outside = found.state in (State.MISSING, State.DRIFTED)
            return (_beyond(patch, build, place) if outside else None) or found
    else:
        found = Verdict(patch.id, State.PENDING, f"decided when {', '.join(waiting)} is imported")
    return _among_others(patch, standing) or found


def _version_verdict(patch: Patch, build: TorchBuild, place: Place) -> Verdict | None:
    if place == "below":
        reason = f"torch {build.version} is older than the fault ({patch.affects})"
        return Verdict(patch.id, State.NOT_AFFECTED, reason)
    if place == "above" and build.version_is_final:
        return _outside(patch, build)
    return None


def _outside(patch: Patch, build: TorchBuild) -> Verdict:
    if patch.fixed_in is not None:
        return Verdict(patch.id, State.FIXED, f"fixed in torch {patch.fixed_in}")
    reason = f"torch {build.version} is outside {patch.affects}"
    return Verdict(patch.id, State.NOT_AFFECTED, reason)


def _beyond(patch: Patch, build: TorchBuild, place: Place) -> Verdict | None:
    """Past the upper bound, code that is gone or has changed is no finding: it is the fix."""
    return _outside(patch, build) if place == "above" else None


def _look(patch: Patch) -> Verdict:
    """What the probe and all edits find, as one verdict."""
    try:
        probes = [] if patch.recognise is None else [patch.recognise()]
        findings = probes + [edit.inspect() for edit in patch.edits]
    except Exception as e:  # noqa: BLE001 - a patch's own code, over a torch it may not know
        return failure(patch.id, e)
    evidence = tuple(line for f in findings for line in f.evidence)
    for kind, state in (
        ("fixed", State.FIXED),
        ("missing", State.MISSING),
        ("drifted", State.DRIFTED),
    ):
        for finding in findings:
            if finding.kind == kind:
                return Verdict(patch.id, state, finding.reason, evidence)
    return Verdict(patch.id, State.OK, findings[0].reason, evidence)


def _among_others(patch: Patch, standing: Mapping[str, State]) -> Verdict | None:
    for other in patch.conflicts:
        if standing.get(other) in _HOLDS:
            reason = f"cannot stand beside {other}, which is {standing[other]}"
            return Verdict(patch.id, State.CONFLICT, reason)
    for other in patch.requires:
        state = standing.get(other)
        if state is State.PENDING:
            return Verdict(patch.id, State.PENDING, f"waits for {other}, which it requires")
        if state not in _SATISFIES:
            shown = "not there" if state is None else state.value
            return Verdict(patch.id, State.BLOCKED, f"requires {other}, which is {shown}")
    return None


def failure(patch_id: str, error: Exception) -> Verdict:
    """The verdict on a patch that raised `error` while it was judged, built or installed."""
    states = {
        TargetNotFound: State.MISSING,
        SourceDrift: State.DRIFTED,
        PatchConflict: State.CONFLICT,
    }
    state = next((s for e, s in states.items() if isinstance(error, e)), State.FAILED)
    text = str(error) if state is not State.FAILED else f"{type(error).__name__}: {error}"
    return Verdict(patch_id, state, text)


def disabled_by(patch: Patch, settings: Settings, named: bool) -> str | None:
    """Why the settings exclude the patch. `named`: the caller's argument asks for it."""
    if settings.mode == "off":
        return f"switched off by {settings.where('mode')}"
    if patch.id in settings.disable:
        return f"disabled by {settings.where('disable')}"
    if named:
        return None
    if settings.only is not None and patch.id not in settings.only:
        return f"not among the patches of {settings.where('only')}"
    if patch.opt_in and settings.only is None:
        return "opt-in: applied only when named"
    return None


def _does_not_exist(name: str) -> bool:
    """Whether an import of `name` is bound to fail. Says no as long as the package that would hold
    it is not imported: finding out would import it."""
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None)
    if name in sys.modules or path is None:
        return False
    return PathFinder.find_spec(name, path) is None
