"""What torchcompat adds to the start of a program (`--rounds N`, default 15).

Each pair of lines is measured in fresh processes that alternate, after one round that fills the
caches of bytecode and files, by user + system time, which other work on the machine disturbs less
than the clock. The difference is the median of the differences within one round.

    python 3.11.7, torch 2.13.0+cpu; two cores of an AMD EPYC, five other jobs on them
                            without        with      added
    import torchcompat      62.8 ms     53.8 ms    +1.2 ms  1.019x   9 rounds
    its names as well       51.4 ms    134.3 ms   +81.7 ms  2.590x   9 rounds
    the door, shut          75.5 ms     77.1 ms    +2.0 ms  1.026x   9 rounds
    apply() first         2822.4 ms   2955.4 ms  +104.5 ms  1.037x   5 rounds
    the same, before       3054.3 ms   3346.6 ms  +334.5 ms  1.110x   5 rounds

"Before" is the commit before this file, measured right before the line above it. The names alone
bring modules of Python that torch loads too, so they count once in the last lines.
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
