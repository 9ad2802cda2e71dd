"""`import torchcompat.auto` applies the patches: the line for the top of a program.

TORCHCOMPAT_AUTO=0 in the environment switches it off from outside. Raises nothing.
"""

from __future__ import annotations

from torchcompat.autoload import init

init(unset="on")
