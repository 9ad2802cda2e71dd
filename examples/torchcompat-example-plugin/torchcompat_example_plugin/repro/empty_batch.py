"""Exit status 0: the error names the batch. 1: it does not. 2: this torch collates it."""

from __future__ import annotations

import os

from torch.utils.data import default_collate

# `torchcompat repro` runs this without and with the patch, and says so here.
if os.environ.get("TORCHCOMPAT_REPRO_APPLY") == "1":
    import torchcompat

    torchcompat.apply(only=["example:empty_batch"])

try:
    default_collate([])
except IndexError as e:
    print(f"default_collate([]): {e}")
    raise SystemExit(0 if "batch" in str(e) else 1) from None
print("default_collate([]) is no error")
raise SystemExit(2)
