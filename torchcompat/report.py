"""The verdicts on all patches, for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torchcompat.build import TorchBuild
from torchcompat.config import Settings
from torchcompat.plugins import Registered
from torchcompat.verdict import FINDINGS, SETTLED, Verdict

_PYTHON: Final = sys.version.split()[0]


@dataclass(frozen=True)
class Report:
    """Verdicts in the order of application. True if there is nothing a person should look at."""

    verdicts: tuple[Verdict, ...]
    build: TorchBuild | None
    settings: Settings

    def __bool__(self) -> bool:
        return not self.findings

    def __len__(self) -> int:
        return len(self.verdicts)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __getitem__(self, patch_id: str) -> Verdict:
        """Raises `KeyError` for a patch that the report is not about."""
        for verdict in self.verdicts:
            if verdict.patch_id == patch_id:
                return verdict
        raise KeyError(patch_id)

    @property
    def findings(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.state in FINDINGS)

    def to_dict(self) -> dict[str, Any]:
        return {
            "torch": None if self.build is None else self.build.to_dict(),
            "python": _PYTHON,
            "settings": self.settings.to_dict(),
            "clean": bool(self),
            "patches": [v.to_dict() for v in self.verdicts],
        }

    def to_json(self) -> str:
        import json  # here for the sake of a quick `import torchcompat`

        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> str:
        """patch, state, reason; one line each."""
        rows = [("patch", "state", "reason")]
        rows += [(v.patch_id, v.state.value, v.reason) for v in self.verdicts]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)

    def __str__(self) -> str:
        torch = "torch is not installed" if self.build is None else str(self.build)
        head = [f"{torch}, Python {_PYTHON}", *self.settings.lines()]
        return "\n".join([*head, "", self.table()])


def explanation(registered: Registered, verdict: Verdict) -> str:
    """Everything there is to say about one patch, here."""
    patch = registered.patch
    settled = "" if verdict.state in SETTLED else "  <- look at this"
    lines = [
        f"{patch.id}: {patch.title}",
        "",
        patch.why,
        "",
        f"torch versions  {patch.affects}"
        + (f" (fixed in {patch.fixed_in})" if patch.fixed_in else ""),
        f"brought by      {registered.provenance}",
        f"looks at        {', '.join(patch.modules)}",
    ]
    lines += [f"changes         {_describe(edit)}" for edit in patch.edits]
    for name, ids in (("requires", patch.requires), ("conflicts", patch.conflicts)):
        lines += [f"{name:<15} {', '.join(ids)}"] if ids else []
    lines += [f"verdict here    {verdict.state.value}: {verdict.reason}{settled}"]
    lines += [f"evidence        {line}" for line in verdict.evidence]
    if patch.repro:
        lines += [f"prove it        python -m torchcompat repro {patch.id}"]
    return "\n".join(lines + [f"see             {link}" for link in patch.links])


def _describe(edit: object) -> str:
    what = (
        getattr(edit, "target", None)
        or f"{getattr(edit, 'module', '?')}:{getattr(edit, 'name', '?')}"
    )
    return f"{what} ({type(edit).__name__})"
