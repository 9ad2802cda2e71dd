"""`warmup`: threads start hot, and nothing but compiled code is left behind."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchcompat
from torchcompat import WarmupError, warmup

WAIT_S = 60.0
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(torch.ones(4))


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts its compiles."""

    def __init__(self) -> None:
        self.compiles = 0

    def __call__(self, gm: torch.fx.GraphModule, _: Any) -> Any:
        self.compiles += 1
        return gm.forward


class Model(nn.Module):
    """Has all that a call can change: a running mean, dropout, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.dropout(self.linear(self.norm(y)))


def in_threads(*work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run(one: Callable[[], Any]) -> None:
        try:
            one()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert errors == []


def test_threads_start_hot() -> None:
    backend = Counting()
    f = torch.compile(lambda y: y.sin() + 1, backend=backend, dynamic=False)
    shapes = [(3,), (4, 5), (2, 2, 2)]
    report = warmup(f, [torch.ones(shape) for shape in shapes])
    assert [item.compiles for item in report] == [1, 1, 1]
    assert backend.compiles == report.compiles == 3
    in_threads(*[lambda s=s: f(torch.ones(s)) for s in shapes])
    assert backend.compiles == 3
    again = warmup(f, [torch.ones(shape) for shape in shapes])
    assert [item.cached for item in again] == [True] * 3


def test_threads_start_hot_backwards_too() -> None:
    compiles: list[str] = []

    def forward(gm: torch.fx.GraphModule, _: Any) -> Any:
        compiles.append("forward")
        return gm.forward

    def backward(gm: torch.fx.GraphModule, _: Any) -> Any:
        compiles.append("backward")
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    model = torch.compile(
        nn.Linear(4, 4), backend=aot_autograd(fw_compiler=forward, bw_compiler=backward)
    )
    warmup(model, [torch.ones(2, 4)], backward=True)
    assert sorted(compiles) == ["backward", "forward"]
    in_threads(*[lambda: model(torch.ones(2, 4)).sum().backward()] * 2)
    assert sorted(compiles) == ["backward", "forward"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_random_numbers_buffers_and_gradients_are_as_before(backend: str, fails: bool) -> None:
    model = Model()
    model.linear.weight.grad = flat = torch.full((4, 4), 7.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    compiled = torch.compile(model, backend=backend)
    example = torch.randn(6, 4, requires_grad=True)
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)

    def loss(output: torch.Tensor) -> torch.Tensor:
        random.random()
        if fails:
            output.sum().backward()
            raise ArithmeticError("no loss")
        return output.sum()

    if fails:
        with pytest.raises(WarmupError, match="ArithmeticError: no loss"):
            warmup(compiled, [example], backward=loss)
    else:
        warmup(compiled, [example], backward=loss)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert all(dict(model.named_buffers())[name] is b for name, b in buffers.items())
    assert model.linear.weight.grad is flat
    assert (flat == 7).all()
    assert model.linear.bias.grad is None
    assert model.norm.weight.grad is None
    assert example.grad is None


def test_state_of_modules_that_a_function_closes_over_or_is_told_of() -> None:
    norm, elsewhere = nn.BatchNorm1d(4), [nn.BatchNorm1d(4)]

    def step(y: torch.Tensor) -> torch.Tensor:
        return elsewhere[0](norm(y))

    example = torch.randn(6, 4) + 3
    warmup(torch.compile(step, backend="eager"), [example], modules=elsewhere)
    assert (norm.running_mean == 0).all()
    assert (elsewhere[0].running_mean == 0).all()


def test_examples_of_all_forms_and_their_tensors_stay() -> None:
    seen: list[Any] = []

    def f(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor):
                tensor.add_(1)

    one = torch.zeros(3)
    inputs = {
        "single": one,
        "positional": (one, 2),
        "keywords": {"y": one, "k": 3},
        "made": lambda device: (torch.ones(1, device=device or "cpu"), [one]),
        "twice": (one, one),
    }
    report = warmup(f, inputs)
    assert [item.name for item in report] == list(inputs)
    assert (one == 0).all()
    assert seen[1][0][1] == 2
    assert seen[2] == ((), {"y": seen[2][1]["y"], "k": 3})
    assert seen[4][0][0] is seen[4][0][1]


def test_what_is_marked_dynamic_is_compiled_dynamic() -> None:
    backend = Counting()
    f = torch.compile(lambda y: y.cos() * 2, backend=backend)
    example = torch.ones(8, 3)
    torch._dynamo.mark_dynamic(example, 0)
    warmup(f, [example])
    f(torch.ones(9, 3))
    f(torch.ones(10, 3))
    assert backend.compiles == 1


def test_replicas_a_mapping_and_a_factory() -> None:
    replicas = [torch.compile(nn.Linear(4, 4 + k), backend="eager") for k in range(2)]
    report = warmup(replicas, [torch.ones(2, 4)], devices=["cpu", "cpu"])
    assert [item.device for item in report] == ["cpu", "cpu"]
    assert len(warmup(replicas, [torch.ones(2, 4)])) == 2
    meta = torch.compile(nn.Linear(4, 4, device="meta"), backend="eager")
    report = warmup({"cpu": replicas[0], "meta": meta}, [torch.ones(2, 4)])
    assert [item.device for item in report] == ["cpu", "meta"]
    made: list[torch.device] = []

    def make(device: torch.device) -> Any:
        made.append(device)
        return torch.compile(nn.Linear(4, 4, device=device), backend="eager")

    warmup(make, [torch.ones(2, 4), torch.ones(3, 4)], factory=True, devices=["cpu", "meta"])
    assert made == [torch.device("cpu"), torch.device("meta")]


def test_an_error_names_the_item() -> None:
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    inputs = {"good": torch.ones(2, 4), "bad": torch.ones(2, 5)}
    with pytest.raises(WarmupError, match=r"warmup 2 of 2, bad on cpu: ") as caught:
        warmup(model, inputs)
    assert (caught.value.item, caught.value.device) == ("bad", "cpu")
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(WarmupError("a", "b", "c", ValueError("d"))))) == (
        "warmup c, a on b: ValueError: d"
    )


@pytest.mark.parametrize("patches", [False, True])
def test_the_recompile_limit_is_an_error(patches: bool) -> None:
    f = torch.compile(lambda y: y.tan(), backend="eager", dynamic=False)
    examples = [torch.ones(n) for n in range(2, 12)]
    with torchcompat.applied(only=None if patches else []):
        with pytest.raises(WarmupError, match=r"warmup 9 of 10.* would run uncompiled: warm up"):
            warmup(f, examples)
    f(torch.ones(40))  # what torch does after that is the user's choice again


def test_progress() -> None:
    items: list[torchcompat.WarmupItem] = []
    f = torch.compile(lambda y: y + 2, backend="eager")
    report = warmup(f, [torch.ones(2)], progress=items.append)
    assert items == list(report)
    assert report.to_dict()["items"][0]["cached"] is False


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    f = torch.compile(lambda y: y + 2, backend="eager")
    warmup(f, {"a": torch.ones(2), "b": torch.ones(2)}, progress=True)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warmup 1/2: a on as given: ")
    assert first.endswith(" s, 1 graphs")
    assert second.endswith(" s, compiled already")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": []}, "inputs is empty"),
        ({"target": 3}, "target is int"),
        ({"devices": "cpu"}, r"it must be a list: \['cpu'\]"),
        ({"target": [torch.sin], "devices": ["cpu", "cpu"]}, "1 callables, devices 2"),
        ({"target": {"cpu": torch.sin}, "devices": ["cpu"]}, "leave devices= out"),
        ({"factory": True}, "factory=True wants"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup(**{"target": torch.sin, "inputs": [torch.ones(2)], **arguments})


def test_nothing_to_go_backward_from() -> None:
    with pytest.raises(WarmupError, match="no output needs a gradient; give backward="):
        warmup(torch.sin, [torch.ones(2)], backward=True)
