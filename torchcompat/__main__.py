"""`python -m torchcompat`."""

from __future__ import annotations

from torchcompat.cli import main

raise SystemExit(main())
