"""Write docs/hazards.md: every hazard by torch and Python version, as `prove` finds it.

    python docs/make_hazards.py [PYTHON …]

Runs `python -m torchcompat prove --json` with each interpreter given (by default those of all tox
environments in .tox), keeps the results in docs/hazards.json, where other versions' earlier results
stay, and writes the table from it. Never edit the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "hazards.json"
TABLE = HERE / "hazards.md"

SIGNS = {
    "fixed by us": "fixed by us",
    "fixed upstream": "fixed upstream",
    "not reproducible here": "-",
    "bug present": "**bug present**",
    "broken by us": "**broken by us**",
}
HEAD = """\
# Hazards by version

Written by `python docs/make_hazards.py` from runs of `python -m torchcompat prove`; do not edit.
*fixed by us*: the program shows the fault on stock torch and not with the patch.
*fixed upstream*: this torch does not have the fault, and the patch says so itself.
A dash: the program cannot show the fault here (no such code in this torch, or hidden by something
else). An empty cell: not run.

"""


def main() -> int:
    """Prove, keep, write; 1 if a proof is a finding or an interpreter gives none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--at-once", default="1")
    options = parser.parse_args()
    pythons = options.pythons or sorted(map(str, HERE.parent.glob(".tox/torch*/bin/python")))
    if not pythons and not RESULTS.exists():
        parser.error("no interpreter given and none in .tox: run tox first, or name some")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    findings = 0
    for python in pythons:
        found = proofs(python, options.at_once)
        if found is None:
            findings += 1
            continue
        key, outcomes = found
        results[key] = outcomes
        findings += sum(outcome.startswith("b") for outcome in outcomes.values())
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    TABLE.write_text(HEAD + table(results))
    return int(findings > 0)


def proofs(python: str, at_once: str) -> tuple[str, dict[str, str]] | None:
    """`torch version, Python version` and the outcome by patch; None if there is none to be had."""
    environ = os.environ | {"PYTHONPATH": str(HERE.parent)}
    command = [python, "-m", "torchcompat", "prove", "--json", "--at-once", at_once]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    try:
        content = json.loads(done.stdout)
        minor = ".".join(content["python"].split(".")[:2])
        key = f"{content['torch']['version']}, Python {minor}"
    except (ValueError, KeyError, TypeError):
        print(f"{python}: no result\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return key, {proof["patch"]: proof["outcome"] for proof in content["proofs"]}


def version(key: str) -> tuple[int, ...]:
    """What columns are sorted by: torch's version, then Python's."""
    torch, _, python = key.partition(", Python ")
    return tuple(int(part) for part in (torch.partition("+")[0] + "." + python).split("."))


def table(results: dict[str, dict[str, str]]) -> str:
    """One row per patch, one column per version."""
    columns = sorted(results, key=version)
    patches = list(dict.fromkeys(patch for column in columns for patch in results[column]))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for patch in patches:
        cells = [SIGNS.get(results[column].get(patch, ""), "") for column in columns]
        lines.append(f"| [{patch}](patches/{patch}.md) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
