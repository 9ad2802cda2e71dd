"""default_device: Dynamo takes one thread's default device for every thread's.

`torch.set_default_device` and `with torch.device(...)` hold in the thread that says so: they push a
function mode, and modes are per thread. What Dynamo looks at is one global for all threads,
`torch.utils._device.CURRENT_DEVICE`: with a thread per device, each thread's choice makes the
compiled functions of all others recompile, until their limit is used up, and what is compiled while
another thread is inside a block is guarded by the wrong device.

The variable becomes thread-local. Compiled code checks it in C, in the module's dict, without
asking anything that Python could answer; so from the first choice on there stands a value in the
dict that equals whatever the asking thread's default device equals. While nobody chooses, the dict
holds the plain None as ever, and nothing costs more.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from torchcompat.patch import Patch, Wrap
from torchcompat.rewrite import ThreadLocal, thread_value

_MODULE: Final = "torch.utils._device"
_NAME: Final = "CURRENT_DEVICE"


class _OfTheAskingThread:
    """Equals what the default device of the thread that compares equals."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __eq__(self, other: object) -> bool:
        return bool(self._storage.value == other)

    def __repr__(self) -> str:
        return repr(self._storage.value)


class Devices:
    """`value` is the thread's own; assigning the first one changes what compiled code sees."""

    def __init__(self, current: object) -> None:
        self.storage = thread_value(None)
        self.seen = _OfTheAskingThread(self.storage)
        self._chosen = False
        if current is not None:
            self.value = current

    @property
    def value(self) -> object:
        return self.storage.value

    @value.setter
    def value(self, device: object) -> None:
        self.storage.value = device
        if not self._chosen and device is not None:
            self._chosen = True
            vars(sys.modules[_MODULE])[_NAME] = self.seen

    def plain(self) -> object:
        """What a guard on this thread's default device has to be made from."""
        return self.storage.value


_devices: Devices


def _make(current: object) -> Devices:
    global _devices
    _devices = Devices(current)
    return _devices


def _guard(original: Any) -> Any:
    def DEFAULT_DEVICE(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The guard takes the value that it will compare with out of the dict. A thread that looks
        # meanwhile finds a guard failing, waits for the compile, and looks again.
        namespace = vars(sys.modules[_MODULE])
        before = namespace[_NAME]
        if not isinstance(before, _OfTheAskingThread):
            return original(self, *args, **kwargs)
        namespace[_NAME] = _devices.plain()
        try:
            return original(self, *args, **kwargs)
        finally:
            namespace[_NAME] = before

    return DEFAULT_DEVICE


PATCH = Patch(
    id="default_device",
    title="One thread's default device must not count in the others",
    why=(
        "With one thread per device, each with torch.set_default_device, every choice makes the "
        "compiled functions of all other threads recompile although their own default device is "
        "the same, until the recompile limit is reached and they run eagerly."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocal(module=_MODULE, name=_NAME, holder=_make),
        Wrap(
            target="torch._dynamo.guards:GuardBuilder.DEFAULT_DEVICE",
            factory=_guard,
            anchors=("add_default_device_guard(",),
        ),
    ),
    repro="repro/default_device.py",
    links=("https://github.com/pytorch/pytorch/issues/115917",),
)
