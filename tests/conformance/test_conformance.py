"""torchcompat's own patches against what holds for every patch, which is in torchcompat.testing."""

from __future__ import annotations

from torchcompat.testing import Conformance


class TestConformance(Conformance):
    """Without the programs, which take minutes: `python -m torchcompat prove` runs them."""

    __test__ = True
    plugin = "builtin"
    reproducers = False
