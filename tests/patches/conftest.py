"""Fixtures of the tests of the patches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchcompat

torchcompat.plan()  # loads torchcompat.patches, also in a checkout that is not installed


@pytest.fixture(autouse=True)
def _stock_torch_to_begin_with() -> None:
    """A training run in an earlier test has applied the patches for the whole process."""
    torchcompat.unapply()


@pytest.fixture
def patched(_stock_torch_to_begin_with: None) -> Iterator[None]:
    call, getattr_ = nn.Module.__call__, nn.Module.__getattr__
    codes = call.__code__, getattr_.__code__
    with torchcompat.applied():
        yield
    assert (nn.Module.__call__, nn.Module.__getattr__) == (call, getattr_)
    assert (call.__code__, getattr_.__code__) == codes, "a hook stayed on nn.Module"
    torch._dynamo.reset()
