"""Fixtures of the tests of the patches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchcompat

torchcompat.plan()  # loads torchcompat.patches, also in a checkout that is not installed


@pytest.fixture(autouse=True)
def _stock_torch_to_begin_with() -> Iterator[None]:
    """A training run in an earlier test has applied the patches for the whole process. And up to
    2.11 overlapping traces of a test leave settings behind that other tests rely on."""
    torchcompat.unapply()
    config = torch._dynamo.config
    names = ("accumulated_recompile_limit", "allow_empty_graphs", "capture_scalar_outputs")
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    kept = {name: getattr(config, name) for name in (limit, *names) if hasattr(config, name)}
    yield
    for name, value in kept.items():
        setattr(config, name, value)


@pytest.fixture
def patched(_stock_torch_to_begin_with: None) -> Iterator[None]:
    call, getattr_ = nn.Module.__call__, nn.Module.__getattr__
    codes = call.__code__, getattr_.__code__
    with torchcompat.applied():
        yield
    assert (nn.Module.__call__, nn.Module.__getattr__) == (call, getattr_)
    assert (call.__code__, getattr_.__code__) == codes, "a hook stayed on nn.Module"
    torch._dynamo.reset()
