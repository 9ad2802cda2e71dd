"""Train DFlash block-diffusion drafters in one process.

Target-model threads hand tapped hidden states straight to drafter threads: no server, no second
process. `python -m dflash train` is the whole path; `dflash.train` reads in the order of the data.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("torchcompat-dflash")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"
