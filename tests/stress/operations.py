"""The operations of the stress program: small records, drawn from a seed, compared with eager.

`KINDS` has for every kind how its settings are drawn and how it is run. An operation compares what
it gets with what plain eager code gives in the same thread, and raises where they differ.

Left out on purpose, because torchcompat refuses them or documents them as not covered: overlapping
`torch.func.jvp`, checkpoints that put the generator back, compiled autograd beside plain backwards,
plain calls beside a `functional_call` of the same module, several threads that use the process's
settings (default dtype, deterministic algorithms) at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from programs import DTYPES, FUNCTIONS, WHOLE, WIDTH, Perceptron, Tensor, World
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

#: Since 2.12 a setting of torch._dynamo.config can be one thread's own; before, blocks leak.
SETTINGS_ARE_PER_THREAD = not torch.__version__.startswith(tuple(f"2.{m}." for m in range(12)))
#: None of them changes a result.
SETTINGS = ("automatic_dynamic_shapes", "assume_static_by_default", "capture_scalar_outputs")
MAX_ROWS = 6


@dataclass(frozen=True)
class Operation:
    """One step of one thread; what it does depends on nothing but these settings."""

    kind: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps({"op": self.kind, **self.settings})


@dataclass
class Actor:
    """A thread of a round: its name, the shared world, and what is its own."""

    name: str
    world: World
    backends: tuple[str, ...]
    model: nn.Module
    twin: nn.Module

    def compiled(self, target: str, settings: dict[str, Any]) -> Any:
        """`target` compiled as `settings` say: shared by all threads or this thread's own."""
        options = {k: settings[k] for k in ("fullgraph", "dynamic") if k in settings}
        backend = self.backends[settings["backend"] % len(self.backends)]
        owner = None if settings["shared"] else self.name
        return self.world.compiled(target, owner, backend=backend, **options)


Draw = Callable[[random.Random], dict[str, Any]]
Run = Callable[[Actor, dict[str, Any]], None]


@dataclass(frozen=True)
class Kind:
    weight: int
    draw: Draw
    run: Run


KINDS: dict[str, Kind] = {}


def kind(weight: int, draw: Draw) -> Callable[[Run], Run]:
    """Register the decorated function as a kind of its name."""

    def register(run: Run) -> Run:
        KINDS[run.__name__] = Kind(weight, draw, run)
        return run

    return register


def plan(seed: int, turn: int, thread: int, length: int) -> list[Operation]:
    """What a thread does in a round: the same list for the same numbers, in every Python."""
    rng = random.Random(f"{seed}/{turn}/{thread}")
    names = list(KINDS)
    chosen = rng.choices(names, [KINDS[name].weight for name in names], k=length)
    return [Operation(name, KINDS[name].draw(rng)) for name in chosen]


# -- what the settings are made of


def _input(rng: random.Random) -> dict[str, Any]:
    rows, dtype = rng.randint(1, MAX_ROWS), rng.choice(DTYPES)
    return {"rows": rows, "dtype": dtype, "numbers": rng.randrange(2**31)}


def _compile(rng: random.Random) -> dict[str, Any]:
    return {
        "backend": rng.randrange(6),
        "shared": rng.random() < 0.7,
        "dynamic": rng.choice((None, None, True, False)),
    }


def _call(rng: random.Random, functions: tuple[str, ...] = tuple(FUNCTIONS)) -> dict[str, Any]:
    function = rng.choice(functions)
    whole = function in WHOLE and rng.random() < 0.5
    made = {"function": function, **_input(rng), **_compile(rng), "fullgraph": whole}
    return {**made, "backward": rng.random() < 0.5}


def _module_call(rng: random.Random) -> dict[str, Any]:
    return {**_input(rng), "dtype": "float32", **_compile(rng), "backward": rng.random() < 0.5}


def _nothing(rng: random.Random) -> dict[str, Any]:
    return {}


def _any(**choices: tuple[Any, ...]) -> Draw:
    """A module call's settings and one of each of `choices`."""
    return lambda rng: {**_module_call(rng), **{k: rng.choice(v) for k, v in choices.items()}}


def tensor(settings: dict[str, Any]) -> Tensor:
    """[rows, WIDTH] of the dtype in the settings, drawn without the process's generator."""
    generator = torch.Generator().manual_seed(settings["numbers"])
    drawn = torch.randn(settings["rows"], WIDTH, generator=generator, dtype=torch.float64)
    return drawn.to(getattr(torch, settings["dtype"]))


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal in a few digits, since backends may compute in another order; and of one kind."""
    loose = 0.05 if expected.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual, expected, rtol=loose, atol=loose)
    got, wanted = ((type(y), y.requires_grad, y.is_inference()) for y in (actual, expected))
    assert got == wanted, f"(type, requires_grad, is_inference) is {got}, eager has {wanted}"


def compare(
    compiled: Any, eager: Any, x: Tensor, backward: bool = False, weights: tuple[Tensor, ...] = ()
) -> None:
    """Outputs of both for x [rows, WIDTH] and, if asked, the gradients of x and `weights`.

    Weights may be shared, so nothing is added to their `grad`.
    """
    inputs = [x.clone().requires_grad_(backward) for _ in range(2)]
    outputs = [f(given) for f, given in zip((compiled, eager), inputs, strict=True)]
    close(*outputs)
    if backward:
        both = [
            _gradients(y.sum(), given, weights) for y, given in zip(outputs, inputs, strict=True)
        ]
        for actual, expected in zip(*both, strict=True):
            close(actual, expected)


def _gradients(loss: Tensor, given: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if weights:
        return torch.autograd.grad(loss, (given, *weights))
    loss.backward()  # a reentrant checkpoint knows no other way
    assert given.grad is not None
    return (given.grad,)


# -- the kinds


@kind(12, _call)
def call(actor: Actor, s: dict[str, Any]) -> None:
    compare(actor.compiled(s["function"], s), FUNCTIONS[s["function"]], tensor(s), s["backward"])


@kind(6, _any())
def module(actor: Actor, s: dict[str, Any]) -> None:
    shared = actor.world.module
    weights = tuple(shared.parameters()) if s["backward"] else ()
    compare(actor.compiled("module", s), shared, tensor(s), s["backward"], weights)


@kind(3, _any())
def train(actor: Actor, s: dict[str, Any]) -> None:
    """One step of the thread's own model, and of its eager twin."""
    compiled = torch.compile(actor.model, backend=actor.backends[0], dynamic=s["dynamic"])
    for f, own in ((compiled, actor.model), (actor.twin, actor.twin)):
        f(tensor(s)).sum().backward()
        with torch.no_grad():
            for weight in own.parameters():
                weight -= 0.01 * weight.grad
                weight.grad = None
    for a, b in zip(actor.model.parameters(), actor.twin.parameters(), strict=True):
        close(a, b)


@kind(2, _nothing)
def reset(actor: Actor, s: dict[str, Any]) -> None:
    torch._dynamo.reset()


def _is_own(name: str, value: Any) -> None:
    now = getattr(torch._dynamo.config, name)
    assert now == value or not SETTINGS_ARE_PER_THREAD, (
        f"config.{name} is {now} in a block of {value}"
    )


@kind(3, _any(setting=SETTINGS, value=(True, False)))
def config_block(actor: Actor, s: dict[str, Any]) -> None:
    with torch._dynamo.config.patch({s["setting"]: s["value"]}):
        _is_own(s["setting"], s["value"])
        module(actor, s)
        _is_own(s["setting"], s["value"])


@kind(1, _any(setting=SETTINGS, value=(True, False)))
def config_assignment(actor: Actor, s: dict[str, Any]) -> None:
    setattr(torch._dynamo.config, s["setting"], s["value"])


@kind(4, _nothing)
def draw(actor: Actor, s: dict[str, Any]) -> None:
    actor.world.note_draw(torch.rand(4, dtype=torch.float64), actor.name)


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@kind(5, _any(mode=tuple(MODES)))
def mode(actor: Actor, s: dict[str, Any]) -> None:
    before = torch.is_grad_enabled()
    with MODES[s["mode"]]():
        compare(actor.compiled("module", s), actor.world.module, tensor(s))
    assert torch.is_grad_enabled() == before


@kind(1, _any(strict=(True, False)))
def export(actor: Actor, s: dict[str, Any]) -> None:
    shared = actor.world.module
    program = torch.export.export(shared, (tensor(s),), strict=s["strict"])
    compare(program.module(), shared, tensor(s))


#: torch.func's gradients refuse the saved-tensor hooks of a checkpoint.
CHECKPOINTED = tuple(name for name in FUNCTIONS if name != "transformed")


@kind(3, lambda rng: {**_call(rng, CHECKPOINTED), "reentrant": rng.random() < 0.5})
def recompute(actor: Actor, s: dict[str, Any]) -> None:
    """A checkpoint around a compiled function."""
    compiled = actor.compiled(s["function"], s)

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(compiled, x, use_reentrant=s["reentrant"], preserve_rng_state=False)

    compare(checkpointed, FUNCTIONS[s["function"]], tensor(s), backward=True)


@kind(3, _any(device=("cpu", "meta")))
def default_device(actor: Actor, s: dict[str, Any]) -> None:
    x = tensor(s)
    with torch.device(s["device"]):
        made = actor.compiled("factory", s)(x)
        assert made.device.type == s["device"], f"{made.device} in a block of {s['device']}"
    made = actor.compiled("factory", s)(x)
    assert made.device.type == "cpu", f"{made.device} outside of any block"


#: How a setting is read, how it is assigned, and what is assigned; the last value is the default.
PROCESS_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[Any, Any]]] = {
    "dtype": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        (torch.float64, torch.float32),
    ),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on, warn_only=True),
        (True, False),
    ),
}


@kind(2, _any(setting=tuple(PROCESS_SETTINGS)))
def process_setting(actor: Actor, s: dict[str, Any]) -> None:
    """A setting of the process that nobody else assigns meanwhile stays as it was assigned."""
    read, assign, values = PROCESS_SETTINGS[s["setting"]]
    with actor.world.process_settings:
        for value in values:
            assign(value)
            module(actor, s)
            assert read() == value, f"{s['setting']} is {read()}, assigned was {value}"


@kind(3, _any(stance=("force_eager", "eager_on_recompile", "fail_on_recompile", "unsafe")))
def stance(actor: Actor, s: dict[str, Any]) -> None:
    """A stance for a while. Under the last two this thread calls nothing compiled: they show in
    threads that they are not meant for."""
    unsafe = s["stance"] == "unsafe"
    block = (
        torch.compiler.set_stance(skip_guard_eval_unsafe=True)
        if unsafe
        else torch.compiler.set_stance(s["stance"])
    )
    eager_only = unsafe or s["stance"] == "fail_on_recompile"
    with block:
        f = actor.world.module if eager_only else actor.compiled("module", s)
        compare(f, actor.world.module, tensor(s))


@kind(3, _any())
def functional_call(actor: Actor, s: dict[str, Any]) -> None:
    """The shared module with weights of this thread's own."""
    weights = dict(actor.twin.state_dict())
    lent = actor.world.lent
    compare(
        lambda x: torch.func.functional_call(lent, weights, (x,)),
        lambda x: torch.func.functional_call(Perceptron(), weights, (x,)),
        tensor(s),
    )


@kind(3, _any())
def symbolic_trace(actor: Actor, s: dict[str, Any]) -> None:
    shared = actor.world.module
    graph = torch.fx.symbolic_trace(shared)
    called = [n.target for n in graph.graph.nodes if n.op == "call_module"]
    wanted = ["layers.0", "norm", "layers.1", "norm"]
    assert called == wanted, f"the graph calls {called}"
    compare(graph, shared, tensor(s))


def _traced(rng: random.Random) -> dict[str, Any]:
    return {**_call(rng, tuple(WHOLE)), "tracing": rng.choice(("real", "fake", "symbolic"))}


@kind(3, _traced)
def make_graph(actor: Actor, s: dict[str, Any]) -> None:
    function = actor.world.functions[s["function"]]
    graph = make_fx(function, tracing_mode=s["tracing"])(tensor(s))
    compare(graph, FUNCTIONS[s["function"]], tensor(s), s["backward"])


def _branched(x: Tensor) -> Tensor:
    """`programs.branched` without torch.cond."""
    return x.sin() if x.sum() > 0 else x.cos() + 1


def _conditional(rng: random.Random) -> dict[str, Any]:
    return {**_call(rng, ("branched",)), "how": rng.choice(("eager", "compiled", "graph"))}


@kind(3, _conditional)
def cond(actor: Actor, s: dict[str, Any]) -> None:
    x = tensor(s)
    function: Any = actor.world.functions["branched"]
    if s["how"] == "compiled":
        function = actor.compiled("branched", {**s, "fullgraph": True})
    elif s["how"] == "graph":
        function = make_fx(function)(x)
    compare(function, _branched, x, s["backward"] and s["how"] != "graph")


@kind(2, _any())
def failing(actor: Actor, s: dict[str, Any]) -> None:
    """An exception of the program arrives as it is."""
    try:
        actor.compiled("failing", s)(tensor(s))
    except ValueError as e:
        assert str(e) == "planned, with 2 dimensions", e
    else:
        raise AssertionError("the compiled function did not raise")


@kind(1, _any())
def attention(actor: Actor, s: dict[str, Any]) -> None:
    """flex_attention in eager code compiles itself."""
    from torch.nn.attention.flex_attention import flex_attention

    q = tensor({**s, "rows": 16})[None, None]
    expected = nn.functional.scaled_dot_product_attention(q, q, q)
    close(flex_attention(q, q, q), expected)


@kind(4, _nothing)
def flags(actor: Actor, s: dict[str, Any]) -> None:
    """What torch says of itself to a thread in eager code."""
    assert not torch.compiler.is_compiling(), "is_compiling() in eager code"
    assert not torch.compiler.is_dynamo_compiling(), "is_dynamo_compiling() in eager code"
    assert torch.get_default_device().type == "cpu"
