"""What the threads compile: functions and modules, fresh in every round.

Dynamo keeps its compiled entries by code object; a copy of the code gives each round an empty
cache, so that a round that fails can be run again by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

WIDTH = 4
DTYPES = ("float32", "float64", "bfloat16")

Tensor = torch.Tensor
Program = Callable[[Tensor], Tensor]


def arithmetic(x: Tensor) -> Tensor:
    return (x.sin() * 2 + x.square()).sum(-1)


def sizes(x: Tensor) -> Tensor:
    """Branches on a size, as dynamic shapes must."""
    if x.shape[0] > 3:
        return x.cos() / x.shape[0]
    return x.tanh() * x.shape[0]


def mutation(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] += 1
    y.mul_(2)
    return y.relu()


def containers(x: Tensor) -> Tensor:
    parts = {str(i): part.exp() for i, part in enumerate(x.unbind(-1))}
    return torch.stack([parts[key] for key in sorted(parts)])


def broken(x: Tensor) -> Tensor:
    """Two graphs with eager code between them."""
    y = x.sigmoid()
    torch._dynamo.graph_break()
    return y * 3 - x


def disabled(x: Tensor) -> Tensor:
    return _eager_helper(x.abs()) + 1


@torch.compiler.disable
def _eager_helper(x: Tensor) -> Tensor:
    return x.sqrt()


def transformed(x: Tensor) -> Tensor:
    """A gradient inside of the graph, one for each row."""
    return torch.func.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))(x)


def factory(x: Tensor) -> Tensor:
    """On the default device of the thread."""
    return torch.ones(x.shape[0], dtype=x.dtype) * 2


def failing(x: Tensor) -> Tensor:
    y = x + 1
    raise ValueError(f"planned, with {y.dim()} dimensions")


def branched(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos() + 1, (x,))


#: Whole ones may be compiled with fullgraph=True.
WHOLE: dict[str, Program] = {
    f.__name__: f for f in (arithmetic, sizes, mutation, containers, transformed)
}
FUNCTIONS: dict[str, Program] = {**WHOLE, broken.__name__: broken, disabled.__name__: disabled}
#: For operations of their own.
SPECIAL: dict[str, Program] = {f.__name__: f for f in (factory, failing, branched)}


class Perceptron(nn.Module):
    """What most models are made of, with a buffer, a norm, and a list of layers."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x).relu()) * self.scale
        return x


def copy_of(function: Program) -> Program:
    """The same function with code, hence compiled entries, of its own."""
    f: Any = function
    return FunctionType(f.__code__.replace(), f.__globals__, f.__name__, None, f.__closure__)


class World:
    """What the threads of one round share: functions, a module, and their compiled wrappers."""

    def __init__(self) -> None:
        self.functions = {name: copy_of(f) for name, f in {**FUNCTIONS, **SPECIAL}.items()}
        self.module = Perceptron()
        #: For functional_call alone: a plain call beside it sees the swapped weights.
        self.lent = Perceptron()
        #: torch.set_default_dtype is one for the process: who uses it takes turns.
        self.process_settings = threading.Lock()
        self._draws: dict[tuple[float, ...], str] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()

    def compiled(self, target: str, owner: str | None, **options: Any) -> Any:
        """The wrapper of a function, or of the module by the name "module": one for the process,
        or one for `owner`."""
        function = self.module if target == "module" else self.functions[target]
        key = (target, owner, *sorted(options.items()))
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = torch.compile(function, **options)
            return self._compiled[key]

    def note_draw(self, numbers: Tensor, thread: str) -> None:
        """Numbers that the process's generator gave to `thread`; AssertionError if it had given
        the same before."""
        key = tuple(numbers.tolist())
        with self._lock:
            first = self._draws.get(key)
            self._draws[key] = thread
        assert first is None, f"{thread} drew the very numbers that {first} had drawn"
