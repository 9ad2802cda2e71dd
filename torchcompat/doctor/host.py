"""What can be told without importing torch: the build, Python, other copies of torch, settings."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from torchcompat import config
from torchcompat.build import TorchBuild, find_build
from torchcompat.doctor.section import Section
from torchcompat.errors import ConfigError


def torch_section() -> Section:
    """Which torch an import finds."""
    section = Section("torch")
    build = find_build()
    if build is None:
        section.lines = ["not installed"]
        section.find("torch is not installed", "install it: pip install torch")
        return section
    section.lines = [str(build), *_more(build)]
    section.data = {**build.to_dict(), "path": build.path, "date": _nightly_date(build)}
    if build.version == "unknown":
        section.find(
            f"{build.path} does not say its version: it is no installed torch",
            "rename the folder if it is yours, or install torch again",
        )
    return section


def _more(build: TorchBuild) -> list[str]:
    day = _nightly_date(build)
    return [f"nightly of {day}"] * bool(day) + [f"in {build.path}"] * bool(build.path)


def _nightly_date(build: TorchBuild) -> str | None:
    """A nightly's number is its day, 20260715."""
    try:
        return date.fromisoformat(
            re.sub(r"(\d{4})(\d\d)(\d\d)", r"\1-\2-\3", str(build.dev_date))
        ).isoformat()
    except ValueError:
        return None


def python_section() -> Section:
    lines = [
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    ]
    data = {"version": platform.python_version(), "executable": sys.executable}
    return Section("python", [*lines, f"in {sys.executable}"], data)


def copies_section(path: Sequence[str] | None = None) -> Section:
    """Everything on `sys.path` that answers to the name torch; the first one is imported."""
    section = Section("copies of torch")
    found = [
        place
        for folder in dict.fromkeys(sys.path if path is None else path)
        for place in _torches(Path(folder or "."))
    ]
    section.lines = [str(place) for place in found]
    section.data = {"found": section.lines}
    for place in found:
        if not (place / "version.py").is_file():
            section.find(
                f"{place} is called torch and is none",
                "rename it: scripts run from there import it in place of torch",
            )
    real = [place for place in found if (place / "version.py").is_file()]
    if len(real) > 1:
        section.find(
            f"{len(real)} copies of torch are on sys.path; {real[0]} is imported",
            f"remove the others: {', '.join(map(str, real[1:]))}",
        )
    for place in real:
        infos = sorted(p.name for p in place.parent.glob("torch-*.dist-info"))
        if len(infos) > 1:
            section.find(
                f"{place.parent} has the metadata of several: {', '.join(infos)}",
                "pip uninstall torch until none is left, then install it once",
            )
    return section


def _torches(folder: Path) -> list[Path]:
    places = [folder / "torch"] if (folder / "torch").is_dir() else []
    places += [folder / "torch.py"] if (folder / "torch.py").is_file() else []
    return [place.resolve() for place in places]


def settings_section() -> Section:
    """What holds, and which layer said so."""
    section = Section("settings")
    try:
        settings = config.load()
    except ConfigError as e:
        section.lines = ["not readable"]
        section.find(str(e), "correct it; until then apply() raises and nothing is patched")
        return section
    section.lines = settings.lines()
    section.data = settings.to_dict()
    if settings.mode == "off":
        section.lines.append("nothing is patched while it is off")
    return section
