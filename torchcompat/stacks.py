"""Every thread's Python stack at one moment, and what the frames alone say that it does.

The stacks are faulthandler's, which reads all of them with the interpreter stopped. To walk other
threads' frames by `f_back` is not safe: they run on between two steps, and Dynamo's own frames
leave links to memory that is used again.
"""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
from collections.abc import Sequence
from typing import Final, NamedTuple

from torchcompat.activity import Kind

_THREAD: Final = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME: Final = re.compile(r'  File "(.*)", line (\S+) in (.*)')


class Frame(NamedTuple):
    """`line` is 0 where it is not known."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"

    def is_in(self, part: str) -> bool:
        """Whether the file is `part`, or in the folder `part/`, of some package."""
        path = self.file.replace("\\\\", "/").replace("\\", "/")
        return f"/{part}" in path if part.endswith("/") else path.endswith(f"/{part}")


def scratch() -> int:
    """A descriptor of a nameless file for `read`. Not to be made in a signal handler where memfd
    is not to be had: tempfile has locks."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("torchcompat-threads")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(descriptor: int) -> dict[int, list[Frame]]:
    """By thread number the frames, innermost first.

    faulthandler shows a hundred frames of a stack and a hundred threads. Takes no lock.
    """
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    faulthandler.dump_traceback(descriptor, all_threads=True)
    size = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, 0, os.SEEK_SET)
    text = b""
    while len(text) < size and (part := os.read(descriptor, size - len(text))):
        text += part
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.decode("ascii", "replace").splitlines():
        if head := _THREAD.match(line):
            frames = found[int(head[1], 16)] = []
        elif frame := _FRAME.match(line):
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(Frame(frame[1], number, frame[3]))
    return found


_BACKWARD: Final = "torch/_functorch/_aot_autograd/runtime_wrappers.py"
#: (what it is, in which file, function names); the first that is found on a stack holds.
_SIGNS: Final[tuple[tuple[Kind, str, frozenset[str]], ...]] = (
    ("backward", _BACKWARD, frozenset({"get_or_compile"})),
    ("export", "torch/export/_trace.py", frozenset({"_export", "_export_for_training"})),
    ("export", "torch/_dynamo/eval_frame.py", frozenset({"export", "inner"})),
    (
        "compile",
        "torch/_dynamo/convert_frame.py",
        frozenset({"__call__", "_compile", "compile_inner"}),
    ),
    (
        "make_fx",
        "torch/fx/experimental/proxy_tensor.py",
        frozenset({"_trace_inner", "dispatch_trace"}),
    ),
    ("fx", "torch/fx/_symbolic_trace.py", frozenset({"trace"})),
    (
        "compiled_call",
        "torch/_dynamo/eval_frame.py",
        frozenset({"compile_wrapper", "_fn", "__call__"}),
    ),
)
_TAKES_COMPILE_LOCK: Final = (
    ("torch/_dynamo/convert_frame.py", "__call__"),
    ("torch/_dynamo/__init__.py", "reset"),
    ("torch/_dynamo/__init__.py", "reset_code_caches"),
)


def kind_of(frames: Sequence[Frame]) -> tuple[Kind, int]:
    """What a stack is about, and the index of the frame that says so (-1 for `other`)."""
    for index, frame in enumerate(frames[1:], 1):
        # Up to 2.11 the backward has no function for it: what it calls tells.
        is_backward = frame.name == "_backward_impl" and frame.is_in(_BACKWARD)
        if is_backward and frames[index - 1].name != "call_func_at_runtime_with_args":
            return "backward", index
    for kind, file, names in _SIGNS:
        for index, frame in enumerate(frames):
            if frame.name in names and frame.is_in(file):
                return kind, index
    return "other", -1


def is_in_compiled_call(frames: Sequence[Frame]) -> bool:
    """Whether the wrapper that torch.compile puts around a function is anywhere on the stack."""
    _, file, names = _SIGNS[-1]
    return any(frame.name in names and frame.is_in(file) for frame in frames)


def is_at_compile_lock(frames: Sequence[Frame]) -> bool:
    """Whether the innermost call of Python code is one that takes Dynamo's compile lock."""
    return bool(frames) and any(
        frames[0].name == name and frames[0].is_in(file) for file, name in _TAKES_COMPILE_LOCK
    )


def is_at_import_lock(frames: Sequence[Frame]) -> bool:
    return bool(frames) and frames[0].name == "acquire" and "importlib._bootstrap" in frames[0].file


def caller(frames: Sequence[Frame], index: int) -> Frame | None:
    """The first frame outside torch, Python's own machinery and this package, from `index` on."""
    for frame in frames[max(index, 0) :]:
        foreign = not frame.file.startswith("<") and not frame.is_in("torchcompat/")
        if foreign and not frame.is_in("torch/") and not frame.is_in("contextlib.py"):
            return frame
    return None
