"""`torchcompat.warmup`: compile before the threads start, from one place."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from torchcompat.errors import WarmupError
from torchcompat.warm_state import copied, modules_behind, tensors_in, untouched

# In this torch, and in 2.6.
_FAIL_AT_LIMIT: Final = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")


@dataclass(frozen=True)
class WarmupItem:
    """One example on one device."""

    name: str
    device: str
    """"as given" where the inputs were not moved."""
    seconds: float
    compiles: int
    """Graphs that torch compiled meanwhile, in the whole process; backward graphs not counted."""

    @property
    def cached(self) -> bool:
        """Whether nothing had to be compiled."""
        return self.compiles == 0

    def __str__(self) -> str:
        graphs = "compiled already" if self.cached else f"{self.compiles} graphs"
        return f"{self.name} on {self.device}: {self.seconds:.2f} s, {graphs}"


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did, in order."""

    items: tuple[WarmupItem, ...]

    @property
    def seconds(self) -> float:
        return sum(item.seconds for item in self.items)

    @property
    def compiles(self) -> int:
        return sum(item.compiles for item in self.items)

    def __iter__(self) -> Iterator[WarmupItem]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        total = f"{len(self)} items, {self.compiles} graphs, {self.seconds:.2f} s"
        return "\n".join([*map(str, self.items), total])

    def to_dict(self) -> dict[str, Any]:
        items = [{**asdict(item), "cached": item.cached} for item in self.items]
        return {"seconds": self.seconds, "compiles": self.compiles, "items": items}


def warmup(
    target: Any,
    inputs: Mapping[str, Any] | Iterable[Any],
    *,
    devices: Sequence[Any] | None = None,
    factory: bool = False,
    backward: bool | Callable[[Any], Any] = False,
    modules: Iterable[Any] = (),
    progress: bool | Callable[[WarmupItem], None] = False,
) -> WarmupReport:
    """Call what is compiled once for every example and device, so that threads find it compiled.

    `target`: a compiled function or module; a mapping from device to one, or a sequence of them
    beside `devices` (replicas; two may be on one device); or with `factory=True` a function that
    gives one for a `torch.device`.

    `inputs`: examples, or a mapping that names them. An example is a tuple of positional arguments,
    a dict of keyword arguments, any other single argument, or a function that makes one of these
    for a `torch.device` (None where inputs are not moved). Tensors are copied, so in-place changes
    and `.grad` do not reach them; shape, strides, dtype, `requires_grad` and `mark_dynamic` are
    those of the example.

    `devices`: where to call; the copies are made there. By default a replica's own, that of its
    first parameter; for a function without parameters inputs stay where they are.

    `backward`: True runs the backward of the sum of all outputs that need a gradient, a function
    makes the scalar loss out of the output. `progress`: True writes a line per item on stderr, a
    function gets each `WarmupItem` as it is done.

    Calls run one after the other in this thread and in its modes (autocast, no_grad,
    inference_mode, default dtype, thread count): compiled code belongs to them, so call this in
    the modes that the threads will use. Not changed afterwards: random generators (torch's of the
    CPU and the devices, `random`, numpy), buffers and `.grad` of the modules that the target is,
    belongs to or closes over, and of `modules`. What else the target does, it does.

    Raises `WarmupError`, with the item's name and device, for what a call raises, and where the
    recompile limit is reached, since that item would run uncompiled; `ValueError` for arguments
    that do not go together.
    """
    torch: Any = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    examples = _named(inputs)
    plan = _plan(torch, target, devices, factory)
    total = len(plan) * len(examples)
    done: list[WarmupItem] = []
    for callable_at, device in plan:
        function = callable_at() if factory else callable_at
        used = {id(d): d for d in (device, _home(function)) if d is not None}.values()
        held = [*modules_behind(function), *modules]
        for name, example in examples.items():
            place = "as given" if device is None else str(device)
            with untouched(held, used), _current(torch, device), _failing_at_limit(torch):
                before, started = _graphs(), time.perf_counter()
                try:
                    _call(torch, function, example, device, backward)
                    if device is not None and device.type == "cuda":
                        torch.cuda.synchronize(device)
                except Exception as e:
                    raise WarmupError(name, place, f"{len(done) + 1} of {total}", e) from e
                seconds = time.perf_counter() - started
                done.append(WarmupItem(name, place, seconds, _graphs() - before))
            _show(progress, done[-1], f"{len(done)}/{total}")
    return WarmupReport(tuple(done))


def _named(inputs: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        named = {}
        for number, example in enumerate(inputs):
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(example))
            named[f"example {number}" + (f": {shapes}" if shapes else "")] = example
    if not named:
        raise ValueError("inputs is empty; give at least one example to call the target with")
    return named


def _plan(
    torch: Any, target: Any, devices: Sequence[Any] | None, factory: bool
) -> list[tuple[Any, Any]]:
    """(the callable, or with `factory` what gives it; its device or None), in order."""
    if isinstance(devices, (str, torch.device)):
        raise ValueError(f"devices is {devices!r}; it must be a list: [{devices!r}]")
    places = None if devices is None else [torch.device(d) for d in devices]
    if factory:
        if not places or not callable(target):
            raise ValueError("factory=True wants a function of a device, and devices=[...]")
        return [(partial(target, d), d) for d in places]
    if isinstance(target, Mapping):
        if places is not None:
            raise ValueError("target is a mapping, its keys are the devices; leave devices= out")
        return [(function, torch.device(d)) for d, function in target.items()]
    if isinstance(target, (list, tuple)):
        if places is not None and len(places) != len(target):
            raise ValueError(f"target has {len(target)} callables, devices {len(places)} devices")
        places = [_home(f) for f in target] if places is None else places
        return list(zip(target, places, strict=True))
    if not callable(target):
        raise ValueError(f"target is {type(target).__name__}; it must be callable, or hold such")
    return [(target, d) for d in ([_home(target)] if places is None else places)]


def _home(function: Any) -> Any:
    """The device of the first parameter, or None."""
    parameters = (p for module in modules_behind(function) for p in module.parameters())
    first = next(parameters, None)
    return None if first is None else first.device


def _call(torch: Any, function: Any, example: Any, device: Any, backward: Any) -> None:
    if callable(example) and not isinstance(example, torch.Tensor):
        example = example(device)
    example = copied(example, device, {})
    args = example if type(example) is tuple else () if isinstance(example, Mapping) else (example,)
    kwargs = example if isinstance(example, Mapping) else {}
    if backward is False:
        function(*args, **kwargs)
        return
    with torch.enable_grad():
        output = function(*args, **kwargs)
        loss = _sum(output) if backward is True else backward(output)
        loss.backward()


def _sum(output: Any) -> Any:
    needing = [t for t in tensors_in(output) if t.requires_grad]
    if not needing:
        raise ValueError("no output needs a gradient; give backward= a function that makes a loss")
    return sum(t.float().sum() for t in needing)


def _current(torch: Any, device: Any) -> AbstractContextManager[Any]:
    on_gpu = device is not None and device.type == "cuda"
    context: AbstractContextManager[Any] = torch.cuda.device(device) if on_gpu else nullcontext()
    return context


def _failing_at_limit(torch: Any) -> AbstractContextManager[Any]:
    """torch does not allow it together with `suppress_errors`."""
    config = torch._dynamo.config
    name = next((n for n in _FAIL_AT_LIMIT if hasattr(config, n)), None)
    if name is None or config.suppress_errors:
        return nullcontext()
    patched: AbstractContextManager[Any] = config.patch({name: True})
    return patched


def _graphs() -> int:
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])


def _show(progress: Any, item: WarmupItem, number: str) -> None:
    if callable(progress):
        progress(item)
    elif progress and sys.stderr is not None:
        sys.stderr.write(f"warmup {number}: {item}\n")
