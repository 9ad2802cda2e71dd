"""An edit for a fault whose place has moved between releases of torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchcompat.install import Slot
from torchcompat.patch import Edit
from torchcompat.verdict import Finding


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstOf(Edit):
    """The first of `edits` whose target exists; the others are for other releases.

    A target that exists but has drifted is the finding: the next form is not tried over code that
    nobody has read. Raises `ValueError` where there is nothing to choose from.
    """

    edits: tuple[Edit, ...]

    def __post_init__(self) -> None:
        if len(self.edits) < 2:
            raise ValueError("FirstOf wants at least two edits")

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for edit in self.edits for name in edit.modules))

    def inspect(self) -> Finding:
        return self._choose()[1]

    def build(self) -> list[Slot]:
        return self._choose()[0].build()

    def _choose(self) -> tuple[Edit, Finding]:
        findings = [(edit, edit.inspect()) for edit in self.edits]
        present = [pair for pair in findings if pair[1].kind != "missing"]
        return present[0] if present else findings[0]
