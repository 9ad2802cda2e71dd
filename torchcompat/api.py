"""The calls that users make; the one engine of the process does the work."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torchcompat import config, thread_view
from torchcompat.config import OnLimit
from torchcompat.engine import ENGINE
from torchcompat.errors import ConfigError, TargetNotFound
from torchcompat.install import AttrSlot, CodeSlot, Slot
from torchcompat.report import Report, explanation
from torchcompat.target import MISSING, Target, unbind


def apply(
    *,
    only: Sequence[str] | None = None,
    strict: bool | None = None,
    on_recompile_limit: OnLimit | None = None,
) -> Report:
    """Apply the patches that this torch needs. May be called at any time, again, from any thread.

    Patches whose modules are not imported are pending and finished when they are. `only` names the
    patches wanted (with those they require); without it the settings decide. `on_recompile_limit`
    says what happens where torch stops compiling a function that has as many compiled versions as
    the limit allows: one `RecompileLimitWarning` ("warn"), or `FailOnRecompileLimitHit` from the
    call ("error"); None leaves it as it is. It holds until the next `apply` with another value, or
    `unapply()` of everything.

    Nothing is raised for a patch that does not fit, except for those named in `only`, and for all
    under `strict=True` or TORCHCOMPAT=strict: `PatchNotApplied`. `strict=False`: never. Settings or
    ids that mean nothing raise `ConfigError`. Under TORCHCOMPAT=off nothing is done or raised.
    """
    thread_view.watch_as_told()
    if on_recompile_limit is not None:
        config.set_arguments({**config.arguments(), "on_recompile_limit": on_recompile_limit})
    return ENGINE.apply(_names(only), strict)


def plan(only: Sequence[str] | None = None) -> Report:
    """What `apply(only=only)` would do now, and why. Changes nothing. Raises `ConfigError`."""
    return ENGINE.plan(_names(only))


def status() -> Report:
    """Where every patch stands in this process. Changes nothing. Raises `ConfigError`."""
    return ENGINE.status()


def explain(patch_id: str) -> str:
    """All about one patch, and the verdict here. Raises `ConfigError` for an unknown id."""
    return explanation(ENGINE.registered(patch_id), status()[patch_id])


def unapply(ids: Sequence[str] | None = None) -> Report:
    """Take patches away, all or those named and those that require them, in reverse order.

    The originals are back by identity. Where other code has put itself over ours, ours stays in
    the chain and passes calls on: state displaced. Raises `ConfigError` for an unknown id.
    """
    if ids is None:
        config.set_arguments({})
    return ENGINE.unapply(_names(ids))


@contextmanager
def applied(
    *,
    only: Sequence[str] | None = None,
    strict: bool | None = None,
    on_recompile_limit: OnLimit | None = None,
) -> Iterator[Report]:
    """`apply()` for a while: what was not applied or pending before is taken away at the end."""
    before, told, in_force = ENGINE.active(), config.arguments(), config.in_force()
    try:
        yield apply(only=only, strict=strict, on_recompile_limit=on_recompile_limit)
    finally:
        unapply(sorted(ENGINE.active() - before))
        config.set_arguments(told)
        config.take_effect(in_force)


def original(target: str) -> Any:
    """What "package.module:Name.attribute" is without the patches; imports the module.

    Raises `ValueError` for another form, `TargetNotFound` for a name that does not exist.
    """
    place = Target.parse(target)
    importlib.import_module(place.module)
    owner, name, value = place.resolve()
    slots = ENGINE.slots()
    here = [s for s in slots if isinstance(s, AttrSlot) and s.owner is owner and s.attr == name]
    while below := next((s for s in here if s.new is value), None):  # one patch over another
        value = below.before
    if value is MISSING:
        raise TargetNotFound(f"{target} does not exist without the patches")
    return _with_own_code(unbind(value)[0], slots)


def _with_own_code(value: Any, slots: Iterable[Slot]) -> Any:
    """`value`, or where its code is a patch's, a copy of it with the code it had."""
    function = inspect.unwrap(value) if callable(value) else value
    for slot in slots:
        if isinstance(slot, CodeSlot) and slot.function is function and slot.current_is_ours():
            copy = FunctionType(
                slot.before,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
            return copy
    return value


def _names(names: Sequence[str] | None) -> list[str] | None:
    if isinstance(names, str):
        raise ConfigError(f"{names!r} is one name; give a list: [{names!r}]")
    return None if names is None else list(names)
