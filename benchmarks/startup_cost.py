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
import statistics
import subprocess
import sys
import tempfile

PAIRS = (
    ("import torchcompat", "pass", "import torchcompat", {}),
    ("its names as well", "pass", "import torchcompat; torchcompat.apply", {}),
    ("the door, shut", "import torch", "import torch", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    ("apply() first", "import torch", "import torchcompat; torchcompat.apply(); import torch", {}),
    ("TORCHCOMPAT_AUTO=1", "import torch", "import torch", {"TORCHCOMPAT_AUTO": "1"}),
)


def seconds(code: str, environ: dict[str, str]) -> float:
    """User and system time of a fresh Python that runs `code`."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True)
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )


def measure(rounds: int) -> list[str]:
    """One line for each pair."""
    with tempfile.TemporaryDirectory() as cache:
        base = {k: v for k, v in os.environ.items() if not k.startswith("TORCHCOMPAT")}
        base.pop("PYTHONDONTWRITEBYTECODE", None)
        base["PYTHONPYCACHEPREFIX"] = cache
        lines = []
        for name, without, with_us, extra in PAIRS:
            environ = {**base, **extra}
            # For the door it is the other way about: the variable takes it out.
            pair = (
                ((without, environ), (with_us, base))
                if "shut" in name
                else ((without, base), (with_us, environ))
            )
            samples = [[seconds(*run) for run in pair] for _ in range(rounds + 1)][1:]
            first, second = (statistics.median(s[i] for s in samples) for i in (0, 1))
            added = statistics.median(b - a for a, b in samples)
            lines.append(
                f"{name:<20} {first * 1e3:7.0f} ms  {second * 1e3:7.0f} ms  "
                f"{added * 1e3:+6.0f} ms  {1 + added / first:.3f}x"
            )
        return lines


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
