"""Which worker runs where, with how many CPU threads, in what arithmetic, with which compiler.

Every choice comes with its reason, so that a run can say why it does what it does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash.errors import ConfigError

# Below this the loss of precision buys nothing.
_WORTH_BFLOAT16 = 1.3


@dataclass(frozen=True)
class Placement:
    """One device per worker thread."""

    targets: tuple[torch.device, ...]
    drafters: tuple[torch.device, ...]
    reason: str

    def __str__(self) -> str:
        return f"targets on {_names(self.targets)}; drafters on {_names(self.drafters)}"


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen."""

    value: str
    reason: str


def place(targets: str, drafters: str, *, gpus: int) -> Placement:
    """The workers' devices from two comma-separated lists, either may be `auto`.

    On n > 1 GPUs three in eight (at least one) are drafters, the last ones: 8 -> targets on 0-4,
    drafters on 5-7. One GPU holds one of each; the CPU one target and two drafters.
    Raises ConfigError for a device that is unknown or not there.
    """
    if gpus > 1:
        split = gpus - max(1, round(gpus * 3 / 8))
        default_targets = [f"cuda:{i}" for i in range(split)]
        default_drafters = [f"cuda:{i}" for i in range(split, gpus)]
    elif gpus == 1:
        default_targets = default_drafters = ["cuda:0"]
    else:
        default_targets, default_drafters = ["cpu"], ["cpu", "cpu"]
    named = [
        name for name, text in (("targets", targets), ("drafters", drafters)) if not _auto(text)
    ]
    found = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''}"
    reason = f"{found} found" + (f", {' and '.join(named)} as asked" if named else "")
    return Placement(
        targets=_devices(targets, default_targets, "placement.targets", gpus),
        drafters=_devices(drafters, default_drafters, "placement.drafters", gpus),
        reason=reason,
    )


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(setting: int, drafters: int) -> int:
    """CPU threads of one operation: the setting, or the cores shared among the drafters.

    It depends on nothing else: a reduction's rounding follows the number of threads, and the
    losses must not follow the number of target workers.
    """
    return setting or max(1, cores() // drafters)


def target_dtype(setting: str, device: torch.device) -> Choice:
    """`float32` or `bfloat16` for a target that only reads and writes text.

    On a CPU the two are measured: having the instructions says little, processors with
    avx512_bf16 and without amx_bf16 multiply slower in bfloat16.
    """
    if setting != "auto":
        return Choice(setting, "as asked")
    if device.type == "cuda":
        return Choice("bfloat16", "a GPU")
    ratio = _cpu_bfloat16_speed()
    how = f"bfloat16 is {ratio:.1f} times as fast on this CPU"
    return Choice("bfloat16" if ratio >= _WORTH_BFLOAT16 else "float32", how)


def compile_backend(setting: str, device: torch.device) -> Choice:
    """The torch.compile backend for the drafter's layers; `off` leaves them uncompiled."""
    if setting != "auto":
        return Choice(setting, "as asked")
    if device.type == "cuda":
        return Choice("inductor", "a GPU")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return Choice("aot_eager", f"no C++ compiler ({compiler}) for inductor's kernels: slower")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Choice("aot_eager", "no Python.h for inductor's kernels: slower")
    return Choice("inductor", f"compiles with {compiler}")


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """What a thread needs before it works on a device: its own stream, and the device current.

    Both are per thread in CUDA; on the default stream target and drafter on one GPU would wait
    for each other at every kernel.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))  # what the main thread prepared
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def _auto(text: str) -> bool:
    return text.strip() == "auto"


def named_devices(text: str, setting: str, gpus: int) -> tuple[torch.device, ...]:
    """Devices from a comma-separated list. ConfigError, naming the setting, for one that is not."""
    return tuple(_device(part.strip(), setting, gpus) for part in text.split(","))


def _devices(text: str, default: list[str], setting: str, gpus: int) -> tuple[torch.device, ...]:
    return named_devices(",".join(default) if _auto(text) else text, setting, gpus)


def _device(name: str, setting: str, gpus: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{setting}: {name!r} is not a device; write cpu or cuda:0, comma between several"
        ) from error
    if device.type == "cuda":
        index = device.index or 0
        if index >= gpus:
            have = f"cuda:0 to cuda:{gpus - 1}" if gpus else "no CUDA device"
            raise ConfigError(f"{setting}: {name} is not here; this machine has {have}")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ConfigError(f"{setting}: {name!r} is not supported; write cpu or cuda:0")
    return torch.device("cpu")


def _names(devices: tuple[torch.device, ...]) -> str:
    return ",".join(str(device) for device in devices)


def _cpu_bfloat16_speed() -> float:
    """Matrix products per second in bfloat16, as a multiple of those in float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = []
        for _ in range(6):  # the first one prepares; the fastest is the least disturbed
            started = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - started)
        seconds[dtype] = min(times[1:])
    return seconds[torch.float32] / seconds[torch.bfloat16]
