"""Shared by the engine's tests: small libraries to patch, in this process and in fresh ones."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchcompat.engine import Engine
from torchcompat.patch import Edit, Patch, Wrap
from torchcompat.plugins import Catalog, Registered

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]

LEAF = """
import contextlib

FLAG = "stock"

def compute(x, scale=1):
    "Multiply."
    return x * scale

def via_flag():
    return FLAG

@contextlib.contextmanager
def scope(name):
    yield name

class Box:
    def get(self, key):
        return ("stock", key)

    @staticmethod
    def make(a):
        return ("stock", a)

    @classmethod
    def build(cls, a):
        return (cls.__name__, a)

    @property
    def size(self):
        return 1

class SmallBox(Box):
    pass
"""

# A plugin that wraps `torch.leaf:compute`; what the stock function returns is negated.
PLUGIN = """
from torchcompat import Patch, Wrap

def negate(original):
    def new(x, scale=1):
        return -original(x, scale)
    return new

PATCHES = [
    Patch(
        id="acme:negate", title="t", why="w", affects=">=2.0.0.dev0", fixed_in="9.9",
        edits=(Wrap(target="torch.leaf:compute", factory=negate, signature=("x", "scale")),),
    )
]
"""

_names = itertools.count()


class Worker(threading.Thread):
    """A started thread; `get` waits, bounded, and raises what the thread raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work, self._result, self._error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as e:
            self._error = e

    def get(self) -> Any:
        self.join(WAIT_S)
        assert not self.is_alive(), "thread stuck"
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def worker() -> type[Worker]:
    return Worker


@pytest.fixture(autouse=True)
def _plain_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test depends on the variables or the folder it is started with."""
    for name in list(os.environ):
        if name.startswith("TORCHCOMPAT"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


class Library:
    """A package of its own for one test, with `leaf` in it; imported when asked for."""

    def __init__(self, folder: Path) -> None:
        self.name = f"fakelib{next(_names)}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.write("__init__", "")
        self.write("leaf", LEAF)
        self.leaf_name = f"{self.name}.leaf"

    def write(self, module: str, source: str) -> str:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return f"{self.name}.{module}"

    def load(self, module: str = "leaf") -> Any:
        return importlib.import_module(f"{self.name}.{module}")

    def target(self, path: str) -> str:
        return f"{self.leaf_name}:{path}"


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.syspath_prepend(str(tmp_path))
    library = Library(tmp_path)
    yield library
    for name in [n for n in sys.modules if n.partition(".")[0] == library.name]:
        del sys.modules[name]


@pytest.fixture
def leaf(lib: Library) -> ModuleType:
    return lib.load()


def make_patch(*edits: Edit, id: str = "p", **fields: Any) -> Patch:
    fields = {"title": "t", "why": "w", "affects": ">=2.0.0.dev0", **fields}
    return Patch(id=id, edits=edits, **fields)


@pytest.fixture
def patch_of() -> Callable[..., Patch]:
    return make_patch


@pytest.fixture
def wrap(lib: Library) -> Callable[..., Wrap]:
    """An edit that puts `label` before what the function at `path` returns."""

    def make(path: str = "compute", label: str = "new", **fields: Any) -> Wrap:
        def factory(original: Any) -> Any:
            return lambda *a, **k: (label, original(*a, **k))

        return Wrap(target=fields.pop("target", lib.target(path)), factory=factory, **fields)

    return make


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    """An engine that knows exactly the given patches."""
    engines: list[Engine] = []

    def make(*patches: Patch) -> Engine:
        engine = Engine()
        known = {p.id: Registered(p, "test", "test") for p in patches}
        engine._catalogs["auto"] = Catalog(known, (), frozenset())
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.unapply(None)
        assert engine._hook not in sys.meta_path


# What torch does at its end since 2.5 (`_import_device_backends`), told here in its own words.
BACKENDS = """
import os
from importlib.metadata import entry_points
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for point in entry_points(group="torch.backends"):
        try:
            point.load()()
        except Exception as e:
            raise RuntimeError(f"backend {point.name} failed") from e
"""


def _install_door(folder: Path) -> None:
    """Make this checkout known in `folder` as a distribution with the entry points of its
    pyproject.toml, whatever else is or is not installed."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    _, table = text.split('[project.entry-points."torch.backends"]')
    entries = table.split("\n[")[0].replace('"', "")
    info = folder / "torchcompat_dflash-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchcompat-dflash\nVersion: 0.1\n"
    )
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entries}")


class World:
    """Fresh processes in which `torch` is a fake and the plugin `acme` is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("torch/__init__.py", "")
        self.write("torch/version.py", "__version__ = '2.13.0+cpu'\ngit_version = 'cafe1234'\n")
        self.write("torch/leaf.py", LEAF)
        self.plugin(PLUGIN)

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def plugin(self, source: str, name: str = "acme", value: str | None = None) -> None:
        """Install the module `name` as distribution and entry point `name`."""
        self.write(f"{name}.py", source)
        info = f"{name}-1.2.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        entry = f"[torchcompat.patches]\n{name} = {value or name}\n"
        self.write(f"{info}/entry_points.txt", entry)

    def door(self) -> None:
        """Let `import torch` call `autoload.init`, as torch does where we are installed."""
        _install_door(self.folder)
        self.write("torch/__init__.py", BACKENDS)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}", **env}
        return subprocess.run(
            [sys.executable, *args],
            env=environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def python(self, code: str, **env: str) -> str:
        """Run code that must succeed; what it printed."""
        done = self.run("-c", textwrap.dedent(code), **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def install_door() -> Callable[[Path], None]:
    return _install_door
