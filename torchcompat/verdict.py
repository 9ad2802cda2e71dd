"""The values of judging: what an edit finds in the loaded torch, what a patch comes to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

FindingKind = Literal["ok", "fixed", "missing", "drifted"]


@dataclass(frozen=True)
class Finding:
    """What one edit, or a patch's own probe, sees in the loaded torch.

    `ok`: the fault is here and the edit fits. `fixed`: this torch does not have the fault.
    `missing`: the name is gone. `drifted`: it is there, but not as the edit knows it.
    """

    kind: FindingKind
    reason: str
    evidence: tuple[str, ...] = ()


class State(str, Enum):
    """Where a patch stands. `OK` is a plan's word for "would be applied"."""

    OK = "ok"
    APPLIED = "applied"
    PENDING = "pending"
    NOT_AFFECTED = "not_affected"
    FIXED = "fixed"
    DRIFTED = "drifted"
    DISABLED = "disabled"
    CONFLICT = "conflict"
    MISSING = "missing"
    BLOCKED = "blocked"
    FAILED = "failed"
    DISPLACED = "displaced"

    def __str__(self) -> str:
        return self.value


# The fault is out of the way, or will be when its module is imported.
SETTLED: Final = frozenset(
    {State.OK, State.APPLIED, State.PENDING, State.FIXED, State.NOT_AFFECTED}
)
# Something a person should look at.
FINDINGS: Final = frozenset(
    {
        State.DRIFTED,
        State.CONFLICT,
        State.MISSING,
        State.BLOCKED,
        State.FAILED,
        State.DISPLACED,
    }
)


@dataclass(frozen=True)
class Verdict:
    """The decision on one patch. `reason` is one sentence; `provenance` who brought the patch."""

    patch_id: str
    state: State
    reason: str
    evidence: tuple[str, ...] = ()
    provenance: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "patch": self.patch_id,
            "state": self.state.value,
            "reason": self.reason,
            "evidence": list(self.evidence),
            "provenance": self.provenance,
        }
