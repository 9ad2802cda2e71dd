"""Train DFlash block-diffusion drafters in one process, and decode with them.

Target-model threads hand tapped hidden states straight to drafter threads: no server, no second
process. `python -m dflash train` is the whole path; `dflash.train` reads in the order of the data.
`dflash.generate` writes text with a drafter.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.generation import Completion, generate

__all__ = ["Completion", "__version__", "generate"]

try:
    __version__ = version("torchcompat-dflash")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the command line tells its mistakes without loading torch.
    if name in ("Completion", "generate"):
        return getattr(importlib.import_module("dflash.generation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
