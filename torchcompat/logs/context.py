"""What a log says about its run: which torch, and what torchcompat did there."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from torchcompat.verdict import State

# "torch 2.11.0", "torch==2.11.0+cu130", "PyTorch version: 2.11.0", "torch.__version__ = '2.11.0'",
# '"torch": "2.11.0"', ".../torch-2.11.0.dist-info". Not "torch>=2.4", not "torchvision 0.20".
_VERSION: Final = re.compile(
    r"(?<![\w.-])(?:py)?torch(?:[._ ](?:__)?version(?:__)?)?"
    r"[\"']?(?:\s*(?:==|[:=])\s*|[ -])[\"']?v?"
    r"(?P<version>[12]\.\d{1,2}(?:\.\d+)?(?:\.?(?:a|b|rc|dev)\d+)*(?:\+[A-Za-z0-9.]*[A-Za-z0-9])?)"
    r"(?![\w%])(?!\.\d)(?! ?(?:times|seconds|s\b|ms\b|x\b|GiB|GB))",
    re.IGNORECASE,
)
_DEMANDED: Final = re.compile(r"(?:requires?|needs?|incompatible with)\s+$", re.IGNORECASE)
_STATES: Final = "|".join(state.value for state in State)
_ROW: Final = re.compile(
    rf"^\s*(?P<id>[\w.:-]+)\s{{2,}}(?P<state>{_STATES})(?:\s{{2,}}(?P<reason>.*))?$"
)
_HEADER: Final = re.compile(r"^\s*patch\s+state\s+reason\s*$")
_NOT_APPLIED: Final = re.compile(r"not applied: (?P<rest>.*)$")
_FINDING: Final = re.compile(rf"(?P<id>[\w.:-]+) (?P<state>{_STATES}): (?P<reason>.*)")
_JSON_PATCH: Final = re.compile(r'"patch": "(?P<id>[^"]+)"')
_JSON_STATE: Final = re.compile(r'"state": "(?P<state>\w+)"')
_REFUSED: Final = re.compile(r"patch '(?P<id>[\w.:-]+)' is (?P<state>\w+): (?P<reason>.*)$")
_MODE: Final = re.compile(r"^\s*mode = (?P<mode>on|off|strict) \(")

#: Lines without any of these are none of ours, unless the context `is_open`.
HINTS: Final = (b"orch", b"  state  ", b"not applied: ", b'"patch": "', b"' is ", b"mode = ")
_SIGHTINGS: Final = 500  # of a version; enough to know
_REPORT_GAP: Final = 20  # lines of others in the middle of a report


@dataclass(frozen=True)
class Stood:
    """What our report in the log says of one patch."""

    state: State
    reason: str
    number: int


@dataclass
class Context:
    """Gathered line by line. `patches` are the ids that rows of reports may begin with."""

    patches: frozenset[str]
    versions: Counter[str] = field(default_factory=Counter)
    version_lines: dict[str, int] = field(default_factory=dict)
    stood: dict[str, Stood] = field(default_factory=dict)
    switched_off: int = 0
    ours_in_frames: int = 0
    _report: int = 0  # the line up to which rows of a report may come
    _json_patch: str = ""

    @property
    def version(self) -> str | None:
        """The version that the log names most often, the first of several."""
        return self.versions.most_common(1)[0][0] if self.versions else None

    def is_open(self, number: int) -> bool:
        """Whether the next line may go on with a report."""
        return number <= self._report

    def look(self, number: int, text: str) -> None:
        """One line without its prefixes."""
        if "orch" in text:
            self._look_for_version(number, text)
            if not self.ours_in_frames and "torchcompat/patches/" in text.replace("\\", "/"):
                self.ours_in_frames = number
        if _HEADER.match(text):
            self._report = number + _REPORT_GAP
        elif number <= self._report and (row := _ROW.match(text)):
            self._note(row["id"], row["state"], row["reason"] or "", number)
            self._report = number + _REPORT_GAP
        elif "not applied: " in text and (found := _NOT_APPLIED.search(text)):
            for finding in map(_FINDING.fullmatch, found["rest"].split("; ")):
                if finding:
                    self._note(finding["id"], finding["state"], finding["reason"], number)
        elif "' is " in text and (found := _REFUSED.search(text)):
            self._note(found["id"], found["state"], found["reason"], number)
        elif (mode := _MODE.match(text)) and mode["mode"] == "off":
            self.switched_off = self.switched_off or number
        if '"' in text:
            self._look_for_json(number, text)

    def _look_for_version(self, number: int, text: str) -> None:
        if sum(self.versions.values()) > _SIGHTINGS:
            return
        for match in _VERSION.finditer(text):
            if not _DEMANDED.search(text[: match.start()]):
                self.versions[match["version"]] += 1
                self.version_lines.setdefault(match["version"], number)

    def _look_for_json(self, number: int, text: str) -> None:
        if patch := _JSON_PATCH.search(text):
            self._json_patch, self._report = patch["id"], number + _REPORT_GAP
        if self._json_patch and (state := _JSON_STATE.search(text)):
            self._note(self._json_patch, state["state"], "", number)
            self._json_patch = ""

    def _note(self, patch: str, state: str, reason: str, number: int) -> None:
        if patch in self.patches and state in State._value2member_map_:
            self.stood[patch] = Stood(State(state), reason.strip(), number)  # the latest counts
