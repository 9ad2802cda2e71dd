"""Plan, apply, take away.

Judging and building run without the lock, because they run patches' code; setting and undoing slots
run under it and do nothing else. A slot that was made for a state that is no more says so when it
is set, and the patch is judged again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from torchcompat import config, plugins
from torchcompat.build import TorchBuild, find_build
from torchcompat.config import Settings
from torchcompat.errors import ConfigError, PatchNotApplied
from torchcompat.hooks import ImportHook
from torchcompat.install import (
    Slot,
    Stale,
    building,
    set_all,
    stale_aliases,
    take_out,
)
from torchcompat.judge import disabled_by, failure, judge
from torchcompat.patch import Patch
from torchcompat.plugins import Catalog, Registered
from torchcompat.report import Report
from torchcompat.verdict import FINDINGS, SETTLED, State, Verdict

log = logging.getLogger("torchcompat")

# Each further try means that another thread, or the importing of torch, got ahead in between.
_TRIES: Final = 1000


@dataclass(eq=False)
class _Record:
    """One patch in this process. Changed under the engine's lock only.

    `wanted`: applied, or waiting for its modules. `slots`: what is set, None if not applied.
    """

    registered: Registered
    verdict: Verdict
    wanted: bool = False
    slots: list[Slot] | None = None

    @property
    def patch(self) -> Patch:
        return self.registered.patch


class Engine:
    """The state of one process: what is applied and what waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: dict[str, _Record] = {}  # by id; in order of application once applied
        self._trying: list[Patch] = []  # being applied right now, by any thread
        self._generation = 0  # of the records: what was judged in an older one is judged again
        self._catalogs: dict[object, Catalog] = {}
        self._hook = ImportHook(before=self._module_starts, after=self._module_ended)
        self._held: Mapping[str, str] = {}  # by the lock file: patch id -> why
        self._logged = ""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._lock_for_fork,
                after_in_parent=self._unlock_after_fork,
                after_in_child=self._new_lock,
            )

    # -- forking: the child gets a whole state, and a lock that nobody holds

    def _lock_for_fork(self) -> None:
        self._lock.acquire()

    def _unlock_after_fork(self) -> None:
        self._lock.release()

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    # -- what there is

    def _catalog(self, settings: Settings) -> Catalog:
        key = settings.plugins
        catalog = self._catalogs.get(key)
        if catalog is None:
            loaded = plugins.load(settings)
            with self._lock:
                catalog = self._catalogs.setdefault(key, loaded)
        catalog.check_ids(settings.disable, settings.where("disable"))
        catalog.check_ids(settings.only or (), settings.where("only"))
        return catalog

    def _select(self, catalog: Catalog, only: Iterable[str] | None) -> list[Registered]:
        """The patches named and those that they require, or all."""
        if only is None:
            return list(catalog.patches.values())
        catalog.check_ids(only, "only=")
        selected: set[str] = set()
        todo = [name for name in only if name in catalog.patches]
        while todo:
            patch_id = todo.pop()
            if patch_id not in selected and patch_id in catalog.patches:
                selected.add(patch_id)
                todo.extend(catalog.patches[patch_id].patch.requires)
        return [r for r in catalog.patches.values() if r.patch.id in selected]

    def _standing(self) -> tuple[int, dict[str, State]]:
        """The generation, and the states in it."""
        with self._lock:
            states = {
                i: State.APPLIED if r.slots is not None else r.verdict.state
                for i, r in self._records.items()
            }
            return self._generation, states

    # -- decide

    def _read_lock(self, settings: Settings, build: TorchBuild | None) -> None:
        """Learn which patches the lock file keeps from being applied. Raises `ConfigError`."""
        if settings.lock is None:
            self._held = {}
            return
        from torchcompat.textual.lock import standing_back  # only now is it needed

        self._held = standing_back(settings.lock, build)

    def _judge(
        self,
        patch: Patch,
        build: TorchBuild | None,
        standing: Mapping[str, State],
        disabled: str | None,
    ) -> Verdict:
        verdict = judge(patch, build, standing, self._hook.is_ready, disabled)
        reason = self._held.get(patch.id)
        if reason is not None and verdict.state in (State.OK, State.PENDING):
            return replace(verdict, state=State.DRIFTED, reason=reason)
        return verdict

    def plan(self, only: Iterable[str] | None) -> Report:
        settings = config.load()
        catalog = self._catalog(settings)
        build = find_build()
        self._read_lock(settings, build)
        _, standing = self._standing()
        verdicts = []
        for registered in self._select(catalog, only):
            patch = registered.patch
            verdict = self._applied_verdict(patch.id)
            if verdict is None:
                disabled = disabled_by(patch, settings, named=only is not None)
                verdict = self._judge(patch, build, standing, disabled)
            standing[patch.id] = verdict.state
            verdicts.append(replace(verdict, provenance=registered.provenance))
        return Report((*self._with_aliases(verdicts), *catalog.broken), build, settings)

    def status(self) -> Report:
        """What stands in this process; for patches never tried, what the plan says."""
        plan = self.plan(None)
        with self._lock:
            tried = {i: r.verdict for i, r in self._records.items()}
        verdicts = tuple(
            v if v.state in (State.APPLIED, State.DISPLACED) else tried.get(v.patch_id, v)
            for v in plan
        )
        return replace(plan, verdicts=verdicts)

    def _applied_verdict(self, patch_id: str) -> Verdict | None:
        """The verdict on an applied patch, by what is in its places now; None if not applied."""
        while True:
            with self._lock:
                record = self._records.get(patch_id)
                if record is None or record.slots is None:
                    return None
                verdict, slots, generation = record.verdict, list(record.slots), self._generation
            lost = [s.describe() for s in slots if not s.is_effective()]
            if not lost:
                return verdict
            with self._lock:
                if generation != self._generation:
                    continue  # taken away while we looked
            reason = f"applied, but something else has since been put in place of {lost[0]}"
            return replace(verdict, state=State.DISPLACED, reason=reason)

    def _with_aliases(self, verdicts: Iterable[Verdict]) -> list[Verdict]:
        """The verdicts with the names that still mean an original, as evidence. Looked for when
        somebody asks, not while modules come in: it goes through everything that is imported."""
        with self._lock:
            owners = {id(s): i for i, r in self._records.items() for s in r.slots or ()}
            slots = self._installed()
        lines: dict[str, tuple[str, ...]] = {}
        for slot, line in stale_aliases(slots):
            patch_id = owners[id(slot)]
            lines[patch_id] = (*lines.get(patch_id, ()), line)
        return [replace(v, evidence=v.evidence + lines.get(v.patch_id, ())) for v in verdicts]

    # -- apply

    def apply(self, only: Sequence[str] | None, strict: bool | None) -> Report:
        settings = config.load()
        if settings.mode == "off":
            return self._switched_off(settings, only or ())
        config.take_effect(settings)
        catalog = self._catalog(settings)
        selected = self._select(catalog, only)
        build = find_build()
        self._read_lock(settings, build)
        verdicts = []
        for registered in selected:
            disabled = disabled_by(registered.patch, settings, named=only is not None)
            with self._imports_ended(registered.patch, disabled is None):
                verdicts.append(self._advance(registered, build, disabled))
        report = Report((*self._with_aliases(verdicts), *catalog.broken), build, settings)
        self._log(report.findings)
        self._raise_for(report, only, strict)
        return report

    @contextmanager
    def _imports_ended(self, patch: Patch, matters: bool) -> Iterator[None]:
        """Imports of the patch's modules that began before are over, later ones are watched."""
        if not matters or self._applied_verdict(patch.id) is not None:
            yield
            return
        with self._lock:
            self._trying.append(patch)
            self._watch()
        try:
            self._hook.wait_for(patch.modules)
            yield
        finally:
            with self._lock:
                self._trying.remove(patch)
                self._watch()

    def _switched_off(self, settings: Settings, named: Sequence[str]) -> Report:
        """Nothing is loaded, and nothing raised: the switch is there to run without us."""
        reason = f"switched off by {settings.where('mode')}"
        verdicts = tuple(Verdict(name, State.DISABLED, reason) for name in named)
        return Report(verdicts, find_build(), settings)

    def _advance(
        self,
        registered: Registered,
        build: TorchBuild | None,
        disabled: str | None = None,
        only_if_wanted: bool = False,
    ) -> Verdict:
        """Judge one patch and bring it as far as it gets: applied, pending, or a reason why not."""
        patch = registered.patch
        for _ in range(_TRIES):
            generation, standing = self._standing()
            applied = self._applied_verdict(patch.id)
            if applied is not None:
                return applied
            verdict = self._judge(patch, build, standing, disabled)
            slots: list[Slot] = []
            try:
                if verdict.state is State.OK:
                    with building(patch.id):
                        slots = [slot for edit in patch.edits for slot in edit.build()]
            except Stale:
                continue
            except Exception as e:  # noqa: BLE001 - a patch's own code
                verdict = failure(patch.id, e)
            verdict = replace(verdict, provenance=registered.provenance)
            with self._lock:
                if generation != self._generation:
                    continue
                record = self._records.get(patch.id)
                if only_if_wanted and (record is None or not record.wanted):
                    return verdict if record is None else record.verdict
                settled = self._settle(registered, verdict, slots)
            if settled is not None:
                return settled
        reason = f"its places in torch kept changing through {_TRIES} tries"
        return Verdict(patch.id, State.FAILED, reason, (), registered.provenance)

    def _settle(
        self, registered: Registered, verdict: Verdict, slots: list[Slot]
    ) -> Verdict | None:
        """Under the lock: make the verdict so and keep it. None if it must be judged again."""
        if verdict.state is State.OK:
            try:
                set_all(slots, self._installed())
            except Stale:
                return None
            except Exception as e:  # noqa: BLE001 - any failure is the patch's verdict
                verdict = replace(failure(verdict.patch_id, e), provenance=verdict.provenance)
            else:
                verdict = replace(verdict, state=State.APPLIED)
        applied, pending = verdict.state is State.APPLIED, verdict.state is State.PENDING
        before = self._records.pop(verdict.patch_id, None)
        if before is None or before.verdict.state is not verdict.state:
            self._generation += 1
        record = _Record(registered, verdict, applied or pending, slots if applied else None)
        self._records[verdict.patch_id] = record
        self._watch()
        if pending and self._could_advance(record):
            return None  # its last module came in between the look and the watch
        return verdict

    def _could_advance(self, record: _Record) -> bool:
        if not all(self._hook.is_ready(m) for m in record.patch.modules):
            return False
        _, states = self._standing()
        return not any(states.get(other) is State.PENDING for other in record.patch.requires)

    def _installed(self, *, without: _Record | None = None) -> list[Slot]:
        return [s for r in self._records.values() if r is not without for s in r.slots or ()]

    def _watch(self) -> None:
        """Applied patches are watched as well: their modules may be reloaded."""
        wanted = [r.patch for r in self._records.values() if r.wanted]
        self._hook.watch(name for patch in wanted + self._trying for name in patch.modules)

    def _raise_for(self, report: Report, only: Sequence[str] | None, strict: bool | None) -> None:
        named = set(only or ()) if strict is not False else set()
        everything = report.settings.mode == "strict" if strict is None else strict
        for verdict in report:
            wrong = verdict.patch_id in named and verdict.state not in SETTLED
            if wrong or (everything and verdict.state in FINDINGS):
                raise PatchNotApplied(verdict.patch_id, verdict)

    def _log(self, findings: Sequence[Verdict]) -> None:
        """One line when patches do not fit, and not the same line again."""
        text = "; ".join(f"{v.patch_id} {v.state.value}: {v.reason}" for v in findings)
        if text and text != self._logged:
            self._logged = text
            log.warning("not applied: %s", text)

    # -- as modules come in; both run in the importing thread and must not raise

    def _module_ended(self, name: str) -> None:
        progress = True
        while progress:
            progress = False
            with self._lock:
                waiting = [r for r in self._records.values() if r.wanted and r.slots is None]
            for record in waiting:
                if self._could_advance(record):
                    verdict = self._advance(record.registered, find_build(), only_if_wanted=True)
                    progress = progress or verdict.state is not State.PENDING
                    self._log([verdict] if verdict.state in FINDINGS else ())

    def _module_starts(self, name: str) -> None:
        """A module of an applied patch is executed again: take the patch away, let it wait."""
        with self._lock:
            for record in reversed(list(self._records.values())):
                if record.slots is not None and name in record.patch.modules:
                    self._take_away(record, f"{name} is being imported again", State.PENDING)

    # -- take away

    def unapply(self, ids: Sequence[str] | None) -> Report:
        unknown = [i for i in ids or () if i not in self._records]
        if unknown:
            self._catalog(config.load()).check_ids(unknown, "ids=")
        with self._lock:
            targets = self._with_dependents(ids)
            verdicts = [
                self._take_away(record, "taken away by unapply()", State.DISABLED)
                for record in reversed(list(self._records.values()))
                if record.wanted and record.patch.id in targets
            ]
            self._watch()
        untouched = set(ids or ()) - {v.patch_id for v in verdicts}
        verdicts += [Verdict(i, State.DISABLED, "is not applied") for i in sorted(untouched)]
        return Report(tuple(verdicts), find_build(), config.load())

    def _with_dependents(self, ids: Iterable[str] | None) -> set[str]:
        if ids is None:
            return set(self._records)
        targets = set(ids)
        size = -1
        while size != len(targets):
            size = len(targets)
            targets |= {i for i, r in self._records.items() if targets & set(r.patch.requires)}
        return targets

    def _take_away(self, record: _Record, reason: str, state: State) -> Verdict:
        """Under the lock. A place that raises keeps its slot, so that it can be tried again."""
        displaced: list[str] = []
        failed: list[Slot] = []
        others = self._installed(without=record)
        for slot in reversed(record.slots or []):
            try:
                place = take_out(slot, others)
            except Exception as e:  # noqa: BLE001 - go on with the other places
                failed.insert(0, slot)
                reason, state = f"{slot.describe()} could not be undone: {e}", State.FAILED
            else:
                displaced += [place] if place is not None else []
        if displaced and state is State.DISABLED:
            reason = f"taken away, but other code holds ours, now inert, at {displaced[0]}"
            state = State.DISPLACED
        provenance = record.registered.provenance
        record.verdict = Verdict(record.patch.id, state, reason, tuple(displaced), provenance)
        record.slots = failed or None
        record.wanted = bool(failed) or state is State.PENDING
        self._generation += 1
        return record.verdict

    def active(self) -> set[str]:
        """The patches applied or pending."""
        with self._lock:
            return {i for i, r in self._records.items() if r.wanted}

    # -- look behind

    def slots(self) -> list[Slot]:
        """Everything that is set at the moment."""
        with self._lock:
            return self._installed()

    def catalog(self) -> Catalog:
        """All patches that the settings allow. Raises `ConfigError`."""
        return self._catalog(config.load())

    def registered(self, patch_id: str) -> Registered:
        """A patch and where it comes from. Raises `ConfigError` for an unknown id."""
        catalog = self.catalog()
        catalog.check_ids((patch_id,), "patch")
        if patch_id not in catalog.patches:
            raise ConfigError(f"the plugin of {patch_id!r} is not loaded")
        return catalog.patches[patch_id]


ENGINE: Final = Engine()
