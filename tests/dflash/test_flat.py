from __future__ import annotations

import copy

import torch
from torch import nn

from dflash.flat import FlatParameters


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(7))
        self.first = nn.Linear(7, 5, bias=False)
        self.second = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.second(self.first(x * self.norm).tanh())


def test_the_module_computes_as_before_and_its_gradients_land_in_the_vector():
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    flat = FlatParameters(model)
    x = torch.randn(4, 7)
    for scale in (1.0, 2.0):  # twice: gradients add up in place
        (plain(x).sum() * scale).backward()
        (model(x).sum() * scale).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine.grad, other.grad)
        assert mine.data_ptr() % 64 == 0
        assert mine.grad.untyped_storage().data_ptr() == flat.grads_P.untyped_storage().data_ptr()
    total = sum(p.grad.square().sum() for p in plain.parameters())
    assert torch.allclose(flat.grads_P.square().sum(), total)
    flat.grads_P.zero_()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_an_optimizer_step_on_the_two_parts_moves_the_module():
    torch.manual_seed(0)
    model = Model()
    flat = FlatParameters(model)
    assert flat.matrices.numel() + flat.vectors.numel() == flat.values_P.numel()
    before = {name: p.clone() for name, p in model.named_parameters()}
    flat.grads_P.fill_(1.0)
    torch.optim.SGD([flat.matrices], lr=0.5).step()
    assert torch.equal(model.norm, before["norm"])
    assert torch.equal(model.first.weight, before["first.weight"] - 0.5)
    torch.optim.SGD([flat.vectors], lr=0.5).step()
    assert torch.equal(model.norm, before["norm"] - 0.5)


def test_state_dict_is_unchanged_by_the_move():
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    FlatParameters(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_layout_names_the_meaning():
    assert FlatParameters(Model()).layout == FlatParameters(Model()).layout
    other = Model()
    other.first = nn.Linear(7, 6, bias=False)
    assert FlatParameters(other).layout != FlatParameters(Model()).layout
