"""What a warm-up must leave as it was: random numbers, buffers, gradients."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

# What leads from a compiled function to the one that was compiled.
_TO_ORIGINAL: Final = ("_torchdynamo_orig_callable", "__wrapped__", "func")


def modules_behind(function: Any) -> list[Any]:
    """The modules that a call of `function` can be seen to use: itself, the one whose method it is,
    those it closes over, those bound by `functools.partial`."""
    module = sys.modules["torch"].nn.Module
    found: list[Any] = []
    seen: set[int] = set()
    todo = [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, module):
            found.append(one)
            continue
        owner = getattr(one, "__self__", None)
        todo += [owner] if isinstance(owner, module) else []
        todo += [getattr(one, name) for name in _TO_ORIGINAL if callable(getattr(one, name, None))]
        if isinstance(one, partial):
            todo += [value for value in one.args if isinstance(value, module)]
        if inspect.isfunction(one):
            held = inspect.getclosurevars(one).nonlocals.values() if one.__closure__ else ()
            todo += [value for value in held if isinstance(value, module)]
    return found


@contextmanager
def untouched(modules: Iterable[Any], devices: Iterable[Any]) -> Iterator[None]:
    """Whatever happens inside, afterwards are as before: torch's generators of the CPU and of
    `devices`, those of `random` and numpy, the buffers of `modules` and their `.grad`.

    Gradients made inside are added to copies, so a `.grad` that is a view of something else stays
    one. Costs a copy of buffers and gradients while it lasts.
    """
    with ExitStack() as stack:
        for restore in _generators(devices):
            stack.callback(restore)
        parts = {id(part): part for module in modules for part in module.modules()}
        for part in parts.values():
            stack.callback(_hold_buffers(part))
        parameters = {id(p): p for part in parts.values() for p in part._parameters.values()}
        for parameter in parameters.values():
            if parameter is not None:
                stack.callback(_hold_grad(parameter))
        yield


def _generators(devices: Iterable[Any]) -> Iterator[Callable[[], None]]:
    torch: Any = sys.modules["torch"]
    yield partial(random.setstate, random.getstate())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield partial(numpy.random.set_state, numpy.random.get_state())
    for device in devices:
        if device.type == "cuda":
            yield partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)


def _hold_buffers(part: Any) -> Callable[[], None]:
    before = dict(part._buffers)
    values = {name: None if b is None else b.detach().clone() for name, b in before.items()}

    def restore() -> None:
        torch: Any = sys.modules["torch"]
        now = part._buffers
        if list(now) != list(before) or any(now[n] is not b for n, b in before.items()):
            now.clear()
            now.update(before)
        for name, buffer in before.items():
            if buffer is not None:
                with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                    buffer.copy_(values[name])

    return restore


def _hold_grad(parameter: Any) -> Callable[[], None]:
    before = parameter.grad
    if before is not None:
        parameter.grad = before.detach().clone()

    def restore() -> None:
        parameter.grad = before

    return restore


def copied(value: Any, device: Any, seen: dict[int, Any]) -> Any:
    """`value` with its tensors copied, and on `device` unless that is None. Looks into tuples,
    lists and mappings; other objects, parameters and tensor subclasses go as they are, moved where
    they have to be. One tensor in two places stays one."""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = _copy(value, device)
        return seen[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(v, device, seen) for v in value))
    if type(value) in (list, tuple):
        return type(value)(copied(v, device, seen) for v in value)
    if type(value) is dict:
        return {k: copied(v, device, seen) for k, v in value.items()}
    return value


def _copy(tensor: Any, device: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if type(tensor) is not torch.Tensor:
        return tensor if device is None else tensor.to(device)
    copy = tensor.detach().to(device or tensor.device, copy=True)
    copy.requires_grad_(tensor.requires_grad)
    # mark_dynamic and its like write on the tensor object.
    vars(copy).update({k: v for k, v in vars(tensor).items() if k.startswith("_dynamo")})
    return copy


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in tuples, lists and mappings."""
    if isinstance(value, sys.modules["torch"].Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from tensors_in(part)
