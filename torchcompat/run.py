"""`torchcompat run -- COMMAND`: become the command, with TORCHCOMPAT_AUTO=1 in the environment.

The variable is inherited, so what the command starts is patched as well: torchrun's workers,
DataLoader workers, subprocesses. The command takes this process's place: its exit status is the
exit status, and signals are its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from torchcompat import config
from torchcompat.autoload import VARIABLE
from torchcompat.errors import ConfigError, TorchCompatError

_SWITCH: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PYTHON: Final = re.compile(r"python[\d.]*t?(\.exe)?")
# Asked of the Python that will run: would `import torch` call us? The current directory does not
# count: a script's sys.path does not begin with it.
_QUESTION: Final = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
from importlib.metadata import entry_points
points = entry_points(group="torch.backends")
sys.exit(not any(p.value == "torchcompat.autoload:init" for p in points))
"""
_ANSWER_S: Final = 60


class CannotRun(TorchCompatError):
    """The command cannot be started; `status` is what a shell would exit with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(command: Sequence[str], module: Sequence[str] | None = None) -> int:
    """Replace this process by the command. Returns only where that fails: 126 or 127, as a shell.

    Raises `ConfigError` where the patches would not be applied, or settings mean nothing.
    """
    config.load()  # told here and now, rather than by every process to come
    try:
        program, argv = resolve(command, module)
        check_door(os.environ, program)
        execute(program, argv, {**os.environ, VARIABLE: "1"})
    except CannotRun as e:
        sys.stderr.write(f"torchcompat run: {e}\n")
        return e.status


def resolve(command: Sequence[str], module: Sequence[str] | None = None) -> tuple[str, list[str]]:
    """The program's path and its arguments, the name first.

    A module, and a file named `*.py`, are run by this Python. Raises `CannotRun` with 127 for what
    does not exist, `ConfigError` where there is no command.
    """
    if module is not None:
        if not module:
            raise ConfigError("run -m wants the name of a module")
        # argparse ends the module's arguments at a "--", which is one of them.
        return sys.executable, [sys.executable, "-m", *module, *command]
    words = list(command[1:] if command[:1] == ["--"] else command)
    if not words:
        raise ConfigError("run wants a command: torchcompat run -- python train.py")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise CannotRun(f"there is no file {words[0]!r}", 127)
        return sys.executable, [sys.executable, *words]
    program = shutil.which(words[0])
    if program is not None:
        return program, words
    if Path(words[0]).is_file() and os.sep in words[0]:
        raise CannotRun(f"{words[0]!r} is not executable", 126)
    raise CannotRun(f"command {words[0]!r} is not found", 127)


def check_door(environ: Mapping[str, str], program: str) -> None:
    """Raises `ConfigError` where `import torch` in `program` would not call `autoload.init`."""
    if environ.get(_SWITCH, "1") != "1":  # torch's own reading of it
        raise ConfigError(
            f"{_SWITCH}={environ[_SWITCH]} keeps torch from loading the patches; unset it, or "
            "begin the program with `import torchcompat.auto`"
        )
    path = Path(program)
    is_other = _PYTHON.fullmatch(path.name) and path.parent.resolve() != _own_folder()
    python = program if is_other else sys.executable
    if not _has_door(python):
        way_out = f", or run {sys.executable}" if is_other else " (a checkout: pip install -e .)"
        raise ConfigError(
            f"torchcompat is not installed for {python}, so nothing would be patched; "
            f"install it there{way_out}"
        )


def _has_door(python: str) -> bool:
    try:
        asked = subprocess.run(
            [python, "-c", _QUESTION], capture_output=True, check=False, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _own_folder() -> Path:
    return Path(sys.executable).parent.resolve()


def execute(program: str, argv: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the program. Raises `CannotRun` with 126 where the system refuses."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, argv, environ)
    except OSError as e:
        raise CannotRun(f"{program!r} cannot be run: {e.strerror}", 126) from e
