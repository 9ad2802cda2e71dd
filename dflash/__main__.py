"""`python -m dflash`."""

from __future__ import annotations

from dflash.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
