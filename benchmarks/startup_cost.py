"""What torchcompat adds to the start of a program (`--rounds N`, default 15).

Each pair of lines is measured in fresh processes that alternate, after one round that fills the
caches of bytecode and files, by user + system time, which other work on the machine disturbs less
than the clock. The difference is the median of the differences within one round.

    python 3.11.7, torch 2.13.0+cpu, two cores of an AMD EPYC with other work on them, 15 rounds

RESULT
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

SHUT = "from torchcompat.autoload import init; init()"
FIRST = "import torchcompat; torchcompat.apply(); import torch"
PAIRS = (
    ("import torchcompat", "pass", "import torchcompat", {}),
    ("its names as well", "pass", "import torchcompat; torchcompat.apply", {}),
    ("the door, shut", "pass", SHUT, {}),
    ("apply() first", "import torch", FIRST, {}),
    ("TORCHCOMPAT_AUTO=1", "import torch", "import torch", {"TORCHCOMPAT_AUTO": "1"}),
)


def seconds(code: str, environ: dict[str, str]) -> float:
    """User and system time of a fresh Python that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def measure(rounds: int) -> Iterator[str]:
    """One line for each pair, as it is measured."""
    with tempfile.TemporaryDirectory() as cache:
        base = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPAT")}
        base.pop("PYTHONDONTWRITEBYTECODE", None)
        base["PYTHONPYCACHEPREFIX"] = cache
        for name, without, with_us, extra in PAIRS:
            pair = ((without, base), (with_us, {**base, **extra}))
            samples = [[seconds(*run) for run in pair] for _ in range(rounds + 1)][1:]
            first, second = (statistics.median(s[i] for s in samples) for i in (0, 1))
            added = statistics.median(b - a for a, b in samples)
            yield (
                f"{name:<20} {first * 1e3:7.1f} ms  {second * 1e3:7.1f} ms  "
                f"{added * 1e3:+6.1f} ms  {1 + added / first:.3f}x"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    version = "from importlib.metadata import version as v; print(v('torch'))"
    torch = subprocess.check_output([sys.executable, "-c", version], text=True).strip()
    print(f"python {sys.version.split()[0]}, torch {torch}, {args.rounds} rounds")
    print(f"{'':<20} {'without':>10}  {'with':>10}  {'added':>9}")
    for line in measure(args.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
