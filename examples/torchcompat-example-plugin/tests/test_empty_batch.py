"""Run with this package installed: `python -m pytest`."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torchcompat


@pytest.fixture(autouse=True)
def patched():
    with torchcompat.applied(only=["example:empty_batch"]):
        yield


def test_an_empty_batch_is_named():
    with pytest.raises(IndexError, match="the batch is empty"):
        default_collate([])
    with pytest.raises(IndexError, match="the batch is empty"):
        next(iter(DataLoader([1, 2], batch_sampler=[[]])))


def test_all_else_is_as_it_was():
    assert torch.equal(default_collate([1, 2]), torch.tensor([1, 2]))
    assert default_collate([{"a": "x"}, {"a": "y"}]) == {"a": ["x", "y"]}
    (batch,) = DataLoader([1, 2], batch_size=2)
    assert torch.equal(batch, torch.tensor([1, 2]))


def test_it_can_be_taken_away():
    torchcompat.unapply(["example:empty_batch"])
    with pytest.raises(IndexError, match="list index out of range"):
        default_collate([])
