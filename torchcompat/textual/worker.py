"""The process in which a torch is only text: judges all patches and takes fingerprints.

Started by `looking.look_into`; reads a job and writes an answer, both JSON. The judging is that of
`plan()`: the same `judge`, the patches' own `recognise` and `inspect`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from torchcompat import config, plugins
from torchcompat.build import TorchBuild
from torchcompat.errors import ConfigError, SourceDrift
from torchcompat.install import Slot
from torchcompat.judge import disabled_by, judge
from torchcompat.patch import Edit, Patch
from torchcompat.textual.fingerprint import Fingerprints
from torchcompat.textual.pseudo import NeedsRunning, World, names_of, nothing_runs
from torchcompat.textual.tree import Tree, open_tree
from torchcompat.verdict import Finding, State, Verdict

#: How many things taken on trust a verdict's evidence names.
_SHOWN: Final = 3


@dataclass(frozen=True)
class _OverText(Edit):
    """An edit of which only `inspect` is asked, over text."""

    edit: Edit
    look: Callable[[Callable[[], Finding]], Finding]

    @property
    def modules(self) -> tuple[str, ...]:
        return self.edit.modules

    def inspect(self) -> Finding:
        return self.look(self.edit.inspect)

    def build(self) -> list[Slot]:
        raise NotImplementedError("nothing is built over text")


class Judging:
    """All patches over one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.build = tree.build()
        self.world = World(tree)
        self.settings = config.load()
        # torch is in place before plugins are loaded: they may import it.
        self.world.install({"torch"})
        self.catalog = plugins.load(self.settings)
        others = {
            name.partition(".")[0]
            for registered in self.catalog.patches.values()
            for name in registered.patch.modules
        } - {"torch"}
        self.world.install({name for name in others if tree.modules(name)})

    def is_ready(self, name: str) -> bool:
        if name in sys.stdlib_module_names:  # not part of any torch, and the same for all
            importlib.import_module(name)
            return True
        return self.tree.file_of(name) is not None

    def verdicts(self) -> list[Verdict]:
        standing: dict[str, State] = {}
        verdicts = []
        self._read_modules()
        for registered in self.catalog.patches.values():
            patch = registered.patch
            disabled = disabled_by(patch, self.settings, named=False)
            self.world.taken_on_trust.clear()
            verdict = judge(
                _over_text(patch, self.build), self.build, standing, self.is_ready, disabled
            )
            standing[patch.id] = verdict.state
            verdicts.append(
                replace(
                    verdict,
                    evidence=(*verdict.evidence, *self._trust(patch, verdict)),
                    provenance=registered.provenance,
                )
            )
        return [*verdicts, *self.catalog.broken]

    def _read_modules(self) -> None:
        """So that the modules in C that they use are in `sys.modules` before a patch asks."""
        for registered in self.catalog.patches.values():
            for name in registered.patch.modules:
                module = self.world.module(name)
                if module is not None:
                    with suppress(SourceDrift):  # the patch will find the same
                        names_of(module)

    def _trust(self, patch: Patch, verdict: Verdict) -> list[str]:
        absent = [n for n in patch.modules if not self.tree.modules(n.partition(".")[0])]
        if verdict.state is State.PENDING and absent:
            return [f"{absent[0].partition('.')[0]} is not part of {self.tree.label}"]
        names = list(self.world.taken_on_trust)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return [f"not in the text, taken to be there: {', '.join(names[:_SHOWN])}{more}"] * bool(
            names and verdict.state is State.OK
        )


def _over_text(patch: Patch, build: TorchBuild) -> Patch:
    """The patch with looks that cannot run anything."""

    def look(ask: Callable[[], Finding]) -> Finding:
        try:
            with nothing_runs():
                return ask()
        except NeedsRunning as e:
            place = f"only a run of {e} tells"
            if build.place(patch.affects) == "above":
                # A build that is no release: `judge` takes this for the fix.
                return Finding("drifted", f"{place}, and torch {build.version} is past the fault")
            reason = f"torch {build.version} is one with the fault ({patch.affects})"
            return Finding("ok", reason, (f"by the version: {place}",))

    probe = patch.recognise
    return replace(
        patch,
        recognise=None if probe is None else lambda: look(probe),
        edits=tuple(_OverText(edit, look) for edit in patch.edits),
    )


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What the job asks of one tree. Raises `ConfigError`."""
    judging = Judging(open_tree(job["target"]))
    build = judging.build
    found: dict[str, Any] = {"torch": {**build.to_dict(), "base": build.base}}
    if job.get("verdicts", True):
        found["verdicts"] = [verdict.to_dict() for verdict in judging.verdicts()]
        found["settings"] = judging.settings.to_dict()
    if job.get("fingerprints"):
        found["fingerprints"] = Fingerprints(judging.world, judging.catalog).to_dict()
        found["files"] = judging.tree.digests
    return found


def main() -> int:
    """Read the job from standard input; the answer goes to standard output, and nothing else."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a plugin that prints would spoil the answer
    try:
        content = answer(json.load(sys.stdin))
    except ConfigError as e:
        content = {"error": str(e)}
    with out:
        json.dump(content, out)
    return 0
