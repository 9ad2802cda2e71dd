"""The whole page: what the checks found, for people and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from torchcompat.doctor.caches import caches_section
from torchcompat.doctor.host import (
    copies_section,
    python_section,
    settings_section,
    torch_section,
)
from torchcompat.doctor.probe import MARK
from torchcompat.doctor.section import Section
from torchcompat.errors import ConfigError
from torchcompat.verdict import FINDINGS, State

_FINDING_STATES: Final = frozenset(state.value for state in FINDINGS)
_ALIAS: Final = " still is the original of "


def doctor(*, imports: bool, modules: Sequence[str], as_json: bool, timeout_s: float) -> int:
    """Print the page. 1 if there is a finding, else 0."""
    sections = [torch_section(), python_section(), copies_section(), settings_section()]
    readable = not sections[-1].findings
    if imports and sections[0].data:
        sections += probe_sections(modules, timeout_s)
    elif readable:
        sections += plan_sections()
    sections.append(caches_section())
    findings = [(s.name, f) for s in sections for f in s.findings]
    if as_json:
        content = {
            "clean": not findings,
            "sections": {s.name: s.data for s in sections},
            "findings": [{"section": name, "text": f.text, "next": f.next} for name, f in findings],
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        sys.stdout.write(page(sections) + "\n")
    return int(bool(findings))


def page(sections: Sequence[Section]) -> str:
    """One block a section, then what is wrong, each with what to do next."""
    width = max(len(s.name) for s in sections)
    lines = []
    for section in sections:
        for i, line in enumerate(section.lines):
            lines.append(f"{section.name if i == 0 else '':<{width}}  {line}")
    findings = [f for s in sections for f in s.findings]
    lines.append("")
    if not findings:
        return "\n".join([*lines, "Nothing to do."])
    lines.append("What to do next")
    for number, finding in enumerate(findings, 1):
        lines += [f"{number}. {finding.text}", f"   -> {finding.next}"]
    return "\n".join(lines)


def plan_sections() -> list[Section]:
    """What can be said of the patches while torch is not imported."""
    import torchcompat

    try:
        report = torchcompat.plan()
    except ConfigError as e:
        section = Section("patches", ["not known"])
        section.find(str(e), "correct the setting")
        return [section]
    return patch_sections(report.to_dict())


def probe_sections(modules: Sequence[str], timeout_s: float) -> list[Section]:
    """What a fresh process with torch sees, or that there was none."""
    section = Section("import torch")
    result, trouble = _probe(modules, timeout_s)
    if result is None:
        section.lines = [f"fails: {trouble}"]
        section.find(
            f"a fresh process that imports torch and the patches fails: {trouble}",
            'run `python -c "import torch"` to see it; `doctor --no-import` does without',
        )
        return [section]
    section.name, section.lines = "devices", result["devices"]
    section.data = {"devices": result["devices"], "cuda": result["cuda"]}
    for name, error in result["not_imported"].items():
        section.find(f"{name} cannot be imported: {error}", "install or mend it")
    return [section, *patch_sections(result["report"]), _conflicts(result["foreign"])]


def _probe(modules: Sequence[str], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    environ = {k: v for k, v in os.environ.items() if k != "TORCHCOMPAT_AUTO"}
    command = [sys.executable, "-m", "torchcompat.doctor.probe", *modules]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no end after {timeout_s:g} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found, ""
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return None, f"status {done.returncode}, {last}"


def patch_sections(report: dict[str, Any]) -> list[Section]:
    """Patches with their reasons, plugins, and names that still mean an original."""
    patches, plugins, aliases = Section("patches"), Section("plugins"), Section("stale aliases")
    patches.data = {"patches": report["patches"]}
    width = max((len(v["patch"]) for v in report["patches"]), default=0)
    for v in report["patches"]:
        patches.lines.append(f"{v['patch']:<{width}}  {v['state']:<12}  {v['reason']}")
        aliases.lines += [line for line in v["evidence"] if _ALIAS in line]
        if v["state"] in _FINDING_STATES:
            way_out = f"python -m torchcompat explain {v['patch']}"
            if v["state"] == State.FAILED.value and v["reason"].startswith("entry point"):
                way_out = f"mend or remove {v['provenance']}; the others work without it"
            patches.find(f"{v['patch']} is {v['state']}: {v['reason']}", way_out)
    brought = [v["provenance"] for v in report["patches"]]
    counts = {name: brought.count(name) for name in dict.fromkeys(brought)}
    broken = {v["provenance"] for v in report["patches"] if v["reason"].startswith("entry point")}
    plugins.lines = [
        f"{name or 'unknown'}: " + ("broken" if name in broken else f"{count} patches")
        for name, count in counts.items()
    ]
    plugins.data = {"patches": counts, "broken": sorted(broken)}
    aliases.data = {"aliases": aliases.lines.copy()}
    if aliases.lines:
        aliases.lines.append("(the patches were applied after the modules were imported, here)")
    return [patches, plugins, *([aliases] if aliases.lines else [])]


def _conflicts(foreign: Sequence[dict[str, str]]) -> Section:
    section = Section("other patchers", data={"functions": list(foreign)})
    section.lines = [f"{f['target']} is from {f['file']}" for f in foreign]
    for f in foreign:
        section.find(
            f"{f['target']}, which {f['patch']} is about, has been replaced by {f['file']}",
            "call torchcompat.apply() before that is imported, or disable one of the two",
        )
    return section
