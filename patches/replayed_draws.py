"""Random numbers that a region of code can draw a second time, whatever other threads draw.

Every draw on the CPU ends in an operator that takes a `generator`. `install` registers a kernel in
Python for these operators, under the dispatch key above the backends (`BackendSelect`): autograd,
tracing and fake tensors are done with by then, and no guard of compiled code sees it. All draws
from the process's own generator then take one lock, so that the generator's state before and after
a draw is known to belong to it.

A `Recording` keeps from which states the draws of its thread came, a `Replay` draws from the same
ones again: the first draw's, and those of later draws before which others have drawn or seeded.
A replay draws from a generator of its own if other threads are alive, and theirs stays as it is;
it is then also what `torch.random`'s functions mean in the thread (see `current_generator`).

Draws on other devices, from explicit generators, or by C++ that asks no operator, pass untouched.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Final

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_drawing = threading.Lock()


class _Thread(threading.local):
    """What this thread is in, innermost last."""

    regions: tuple[Recording | Replay, ...] = ()
    drawing = False
    """Whether it is in an operator that draws: the operators that this one calls are part of it."""


_thread: Final = _Thread()


def _torch() -> Any:
    return sys.modules["torch"]


class Recording:
    """The states that one run's draws came from."""

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        """Number of a draw -> the state before it, where that is not the state after the last."""
        self._count = 0
        self._last: Any = None

    def note(self, before: Any, after: Any) -> None:
        if self._last is None or not _torch().equal(before, self._last):
            self.states[self._count] = before
        self._last = after
        self._count += 1

    @contextmanager
    def replayed(self, start: Any = None, *, alone: bool | None = None) -> Iterator[None]:
        """Inside, this thread draws what was drawn when this was recorded.

        `start`: the state for a generator of its own; by default that of the process's generator.
        `alone`: whether to draw from the process's; by default, where no other thread is alive.
        """
        if not _state["on"]:  # taken away since
            yield
            return
        replay = Replay(self, start, threading.active_count() == 1 if alone is None else alone)
        enter(replay)
        try:
            yield
        finally:
            leave(replay)


class Replay:
    """One more run of a recording. `generator`: what it draws from."""

    def __init__(self, recording: Recording, start: Any, alone: bool) -> None:
        self._states = recording.states
        self._count = 0
        self._last: Any = None
        self.alone = alone
        self.generator: Any = _torch().default_generator
        if not alone:
            state = self.generator.get_state() if start is None else start
            self.generator = _torch().Generator()
            self.generator.set_state(state)

    def prepare(self) -> None:
        """Before a draw. A thread that began meanwhile may have drawn from the process's one."""
        wanted = self._states.get(self._count, self._last)
        self._count += 1
        if wanted is not None and not _torch().equal(wanted, self.generator.get_state()):
            self.generator.set_state(wanted)

    def drawn(self) -> None:
        self._last = self.generator.get_state() if self.alone else None


def enter(region: Recording | Replay) -> None:
    """From here on `region` is about this thread's draws."""
    _thread.regions = (*_thread.regions, region)


def leave(region: Recording | Replay) -> None:
    _thread.regions = tuple(r for r in _thread.regions if r is not region)


def _innermost() -> tuple[Replay | None, list[Recording]]:
    """The replay that this thread's draws come from, and the recordings inside of it."""
    recordings: list[Recording] = []
    for region in reversed(_thread.regions):
        if isinstance(region, Replay):
            return region, recordings
        recordings.append(region)
    return None, recordings


def current_generator() -> Any:
    """The generator that stands for the process's own in this thread."""
    for region in reversed(_thread.regions):
        if isinstance(region, Replay):
            return region.generator
    return _torch().default_generator


def _draw(run: Callable[[Any], Any]) -> Any:
    """What `run(generator)` draws, noted or replayed as this thread's regions want it."""
    _thread.drawing = True
    try:
        if not _thread.regions:
            with _drawing:
                return run(None)
        replay, recordings = _innermost()
        if replay is not None and not replay.alone:
            return _in_regions(run, replay.generator, replay, recordings)
        with _drawing:
            return _in_regions(run, _torch().default_generator, replay, recordings)
    finally:
        _thread.drawing = False


def _in_regions(
    run: Callable[[Any], Any], generator: Any, replay: Replay | None, recordings: list[Recording]
) -> Any:
    if replay is not None:
        replay.prepare()
    before = generator.get_state() if recordings else None
    drawn = run(generator)
    if replay is not None:
        replay.drawn()
    if recordings:
        after = generator.get_state()
        for recording in recordings:
            recording.note(before, after)
    return drawn


class _Default:
    """How the process's generator looks to a kernel: an object of its own, made from C++."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._shown_by = 0

    def look(self) -> None:
        """Have it shown by a draw of no numbers."""
        torch = _torch()
        self._shown_by = threading.get_ident()
        torch.empty(0).uniform_(generator=torch.default_generator)
        self._shown_by = 0

    def is_(self, generator: Any) -> bool:
        if self._shown_by == threading.get_ident():
            self._seen = generator
        return self._seen is generator


_default: Final = _Default()


def _kernel(operator: Any) -> Callable[..., Any]:
    """`operator` for the key above the backends: looks at draws on the CPU, passes others on."""
    torch = _torch()
    arguments = operator._schema.arguments
    place = [a.name for a in arguments].index("generator")
    if arguments[place].kwarg_only:
        place = len(arguments)
    redispatch, tensor = operator._handle.redispatch_boxed, torch.Tensor
    above = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = keys - above
        given = args[place] if len(args) > place else kwargs.get("generator")
        on_cpu = False
        for value in (*args[:2], kwargs.get("out")):
            if isinstance(value, tensor):
                on_cpu = value.is_cpu
                break
        if not on_cpu or _thread.drawing or not (given is None or _default.is_(given)):
            return redispatch(below, *args, **kwargs)

        def run(generator: Any) -> Any:
            if len(args) > place:
                return redispatch(below, *args[:place], generator, *args[place + 1 :], **kwargs)
            return redispatch(below, *args, **{**kwargs, "generator": generator})

        return _draw(run)

    return kernel


def _skip_in_dynamo(code: CodeType) -> None:
    """A compiled call that runs an operator eagerly would compile the kernel's frames."""
    importlib.import_module(_EVAL_FRAME).skip_code(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            _skip_in_dynamo(const)


def drawing_operators() -> list[Any]:
    """The operators of torch that draw on the CPU, each with an argument `generator`."""
    torch = _torch()
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        if all(a.name != "generator" for a in schema.arguments):
            continue
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        try:
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            leaf = has(name, "CPU") and not has(name, "BackendSelect")
        except RuntimeError:  # TorchScript's own, not the dispatcher's
            continue
        if leaf:
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            found.append(getattr(packet, schema.overload_name or "default"))
    return found


_state: dict[str, Any] = {"on": False, "library": None, "at_fork": False}


def switch_on() -> None:
    """From now on `install` installs."""
    _state["on"] = True


def switch_off() -> None:
    """Take the kernels away; recordings are replayed no more."""
    _state["on"] = False
    with _drawing:
        library, _state["library"] = _state["library"], None
    if library is not None:
        library._destroy()


def is_on() -> bool:
    return bool(_state["on"])


def install() -> None:
    """Register the kernels, if they are not. Not at the start: a program that never records does
    not pay for them."""
    if _state["library"] is not None or not _state["on"]:
        return
    operators = drawing_operators()
    with _drawing:
        if _state["library"] is not None:
            return
        library = _torch().library.Library("aten", "IMPL")
        ours: tuple[Any, ...] = (_kernel, _draw, _in_regions, _innermost, _torch)
        for function in (*ours, Recording.note, Replay.prepare, Replay.drawn, _Default.is_):
            _skip_in_dynamo(function.__code__)
        for operator in operators:
            name = operator._schema.name.removeprefix("aten::")
            if operator._schema.overload_name:
                name += f".{operator._schema.overload_name}"
            library.impl(name, _kernel(operator), "BackendSelect", with_keyset=True)
        if not _state["at_fork"] and hasattr(os, "register_at_fork"):
            # a child's threads but the one that forked are gone, and with them who had the lock
            os.register_at_fork(after_in_child=_fresh_lock)
            _state["at_fork"] = True
        _state["library"] = library
    _default.look()


def _fresh_lock() -> None:
    global _drawing
    _drawing = threading.Lock()
