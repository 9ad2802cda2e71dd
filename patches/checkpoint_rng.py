"""checkpoint_rng: a recomputation draws other random numbers than its forward did.

`torch.utils.checkpoint` with `preserve_rng_state=True` keeps the state of the process's random
generator when a forward begins, and puts it back for the recomputation. The generator is
everybody's: where another thread draws from it between that moment and the forward's own draws, or
during the recomputation, dropout masks differ and gradients are wrong, silently; and what other
threads drew during a recomputation is drawn again after it. Every torch to date.

The forward of a region notes from which states its draws came, its recomputation draws from the
same ones (`replayed_draws`), away from the process's generator if other threads are alive. Numbers
are the ones that stock torch draws.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from torchcompat.errors import SourceDrift
from torchcompat.install import CodeSlot, Slot, UndoState
from torchcompat.patch import Edit, Patch, Value, Wrap
from torchcompat.rewrite import functions_using, rewrite_globals
from torchcompat.target import MISSING
from torchcompat.verdict import Finding

from . import replayed_draws
from .replayed_draws import Recording

_CHECKPOINT: Final = "torch.utils.checkpoint"
_RANDOM: Final = "torch.random"
_GENERATOR: Final = "default_generator"
_MINE: Final = "_torchcompat_recording"


def _cell(function: Any, name: str) -> Any:
    """What a closure knows as `name`, or MISSING."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else MISSING


class _Region:
    """A reentrant checkpoint's function: recorded at its first call, replayed at all others."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._recording = Recording()
        self._recorded = False
        self.start: Any = None
        self.alone = True

    def __call__(self, *args: Any) -> Any:
        if self._recorded:
            with self._recording.replayed(self.start, alone=self.alone):
                return self._function(*args)
        self._recorded = True
        replayed_draws.enter(self._recording)
        try:
            return self._function(*args)
        finally:
            replayed_draws.leave(self._recording)


def _forward(original: Any) -> Any:
    def forward(ctx: Any, run_function: Any, preserve_rng_state: Any, *args: Any) -> Any:
        if not preserve_rng_state:
            return original(ctx, run_function, preserve_rng_state, *args)
        replayed_draws.install()
        return original(ctx, _Region(run_function), preserve_rng_state, *args)

    return forward


def _backward(original: Any) -> Any:
    def backward(ctx: Any, *grads: Any) -> Any:
        region = ctx.run_function
        if isinstance(region, _Region):
            region.start = ctx.fwd_cpu_state
            region.alone = threading.active_count() == 1
            # Away from the process's generator there is nothing of it to put back; a device's
            # generator is torch's to put back.
            away = replayed_draws.is_on() and not region.alone and not ctx.had_device_in_fwd
            ctx.preserve_rng_state = not away
        return original(ctx, *grads)

    return backward


def _frame(original: Any) -> Any:
    def __init__(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        if _cell(recompute_fn, "preserve_rng_state") is not True:
            original(self, recompute_fn, *args, **kwargs)
            return
        replayed_draws.install()
        recording = Recording()

        def replayed(*inputs: Any) -> None:
            with recording.replayed():
                recompute_fn(*inputs)

        original(self, replayed, *args, **kwargs)
        setattr(self, _MINE, recording)

    return __init__


def _hook(original: Any) -> Any:
    def __init__(self: Any, frame: Any) -> None:
        original(self, frame)
        setattr(self, _MINE, getattr(frame, _MINE, None))

    return __init__


def _hooks() -> Any:
    return sys.modules["torch"].autograd.graph.saved_tensors_hooks


def _enter(_: Any) -> Any:
    def __enter__(self: Any) -> Any:
        recording = getattr(self, _MINE, None)
        if recording is not None:
            replayed_draws.enter(recording)
        return _hooks().__enter__(self)

    return __enter__


def _exit(_: Any) -> Any:
    def __exit__(self: Any, *error: Any) -> Any:
        recording = getattr(self, _MINE, None)
        if recording is not None:
            replayed_draws.leave(recording)
        return _hooks().__exit__(self, *error)

    return __exit__


class _Current:
    """Stands for the global `default_generator` in the functions of `torch.random`."""

    @property
    def value(self) -> Any:
        return replayed_draws.current_generator()


class _Draws(Slot):
    """The kernels of `replayed_draws`, which the first checkpoint installs."""

    def set(self) -> None:
        replayed_draws.switch_on()

    def undo(self) -> UndoState:
        replayed_draws.switch_off()
        return "restored"

    def current_is_ours(self) -> bool:
        return replayed_draws.is_on()

    def describe(self) -> str:
        return "operators that draw random numbers on the CPU"


class _PerThreadGenerator(Edit):
    """The functions of `torch.random` act on the generator that this thread draws from."""

    @property
    def modules(self) -> tuple[str, ...]:
        return (_RANDOM, _CHECKPOINT)

    def _codes(self) -> list[Slot]:
        functions = functions_using(sys.modules[_RANDOM], _GENERATOR)
        names = {f.__name__ for f in functions}
        if not {"get_rng_state", "set_rng_state"} <= names:
            raise SourceDrift(f"{_RANDOM} keeps the process's generator in another way")
        return [CodeSlot(f, rewrite_globals(f, {_GENERATOR: _Current()})) for f in functions]

    def inspect(self) -> Finding:
        try:
            self._codes()
        except SourceDrift as e:
            return Finding("drifted", str(e))
        return Finding("ok", "a recomputation draws from the process's generator")

    def build(self) -> list[Slot]:
        return [_Draws(), *self._codes()]


PATCH = Patch(
    id="checkpoint_rng",
    title="A checkpoint's recomputation must draw the random numbers that its forward drew",
    why=(
        "Activation checkpointing puts the process's random generator back for the recomputation. "
        "Other threads draw from it too: dropout masks of forward and recomputation differ, and "
        "gradients are wrong, silently."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        _PerThreadGenerator(),
        Wrap(
            target=f"{_CHECKPOINT}:CheckpointFunction.forward",
            factory=_forward,
            signature=("ctx", "run_function", "preserve_rng_state", "args"),
            anchors=("ctx.fwd_cpu_state = torch.get_rng_state()",),
        ),
        Wrap(
            target=f"{_CHECKPOINT}:CheckpointFunction.backward",
            factory=_backward,
            anchors=("ctx.preserve_rng_state and ctx.had_device_in_fwd", "ctx.run_function("),
        ),
        Wrap(
            target=f"{_CHECKPOINT}:_CheckpointFrame.__init__",
            factory=_frame,
            signature=("self", "recompute_fn", "early_stop", "unpack_error_cb", "metadata_fn"),
        ),
        Wrap(
            target=f"{_CHECKPOINT}:_checkpoint_hook.__init__",
            factory=_hook,
            signature=("self", "frame"),
        ),
        Value(target=f"{_CHECKPOINT}:_checkpoint_hook.__enter__", factory=_enter, create=True),
        Value(target=f"{_CHECKPOINT}:_checkpoint_hook.__exit__", factory=_exit, create=True),
    ),
    repro="repro/checkpoint_rng.py",
)
