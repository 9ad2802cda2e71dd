"""What the checks give: sections of facts, and findings that each say what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and the way out of it."""

    text: str
    next: str


@dataclass
class Section:
    """One block of the page: lines to read, the same for programs, and findings."""

    name: str
    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def find(self, text: str, next: str) -> None:
        self.findings.append(Finding(text, next))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
