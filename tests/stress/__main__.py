"""Many threads, random operations of the compiler, every result compared with eager.

python tests/stress --seed 1 --minutes 5 --threads 6
python tests/stress --seed 1 --replay 12 --only call,reset     # one round of it, fewer operations
python tests/stress --stock                                    # what torch does by itself
"""

from __future__ import annotations

import sys

from runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
