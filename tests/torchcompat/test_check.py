"""`check`: the verdicts on a torch that is only text are those of `plan()` on it imported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from torchcompat.errors import ConfigError

LEAF = """
import contextlib
import functools
import importlib
import threading
from typing import TYPE_CHECKING

from torch.other import helper, Base
from torch._C import probe

if TYPE_CHECKING:
    from nowhere import Thing

FLAG = False
LOCK = threading.RLock()
TABLE: dict[int, str] = {}

def compute(x, scale=1):
    "Multiply."
    return x * scale

def is_on():
    return FLAG

def turn_on(value=True):
    global FLAG
    FLAG = value

@contextlib.contextmanager
def scope(name):
    yield name

@functools.lru_cache(None)
def cached(a, b):
    return a, b

class Box(Base):
    size_: "int" = 1

    def get(self, key):
        return ("stock", key)

    __call__ = get

    @staticmethod
    def make(a):
        return ("stock", a)

    @classmethod
    def build(cls, a):
        return (cls.__name__, a)

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        pass

def closing(fn):
    count = 0

    def inner(*args):
        nonlocal count
        count += 1
        return fn(*args)

    return inner
"""
OTHER = """
def helper(a, *, b=None):
    return a

class Base:
    def inherited(self, what):
        return what

    def __init_subclass__(cls):
        cls.__init_subclass__ran = True
"""
# In C for the check; for the plan a module of this text stands for it.
IN_C = "def probe(value):\n    return value\n"

PLUGIN = """
import importlib
import sys
import threading
from types import FunctionType
from torchcompat import Code, FirstOf, Finding, Patch, Replace, ThreadLocal, Value, Wrap

LEAF = "torch.leaf"

def patch(id, *edits, **fields):
    fields = {"affects": ">=2.0.0.dev0", **fields}
    return Patch(id="acme:" + id, title="t", why="w", edits=edits, **fields)

def wrap(path, **fields):
    return Wrap(target=LEAF + ":" + path, factory=lambda f: f, **fields)

def state():
    leaf = sys.modules[LEAF]
    for name, kind in (("LOCK", type(threading.RLock())), ("TABLE", dict), ("Box", type)):
        if not isinstance(vars(leaf).get(name), kind):
            return Finding("drifted", name + " is of another type")
    if vars(leaf).get("importlib") is not importlib:
        return Finding("drifted", "imports are made otherwise")
    if leaf.Box.__annotations__.get("size_") not in ("int", "'int'"):
        return Finding("drifted", "size_ is of another type")
    inner = [c for c in leaf.closing.__code__.co_consts if getattr(c, "co_name", "") == "inner"]
    return Finding("ok" if inner else "fixed", "state looked at")

def in_c():
    return Finding("ok" if sys.modules["torch._C"].probe(1) == 1 else "fixed", "asked")

PATCHES = [
    patch("compute", wrap("compute", signature=("x", "scale"), anchors=("x * scale",))),
    patch("replace", Replace(target=LEAF + ":compute", factory=lambda f: f, anchors=("Multiply",))),
    patch("method", wrap("Box.get", signature=("self", "key"))),
    patch("alias", wrap("Box.__call__", signature=("self", "key"), anchors=("stock",))),
    patch("static", wrap("Box.make", signature=("a",))),
    patch("klass", wrap("Box.build", signature=("cls", "a"))),
    patch("prop", wrap("Box.size", anchors=("return 1",))),
    patch("base", wrap("Box.inherited", signature=("self", "what"), anchors=("return what",))),
    patch("imported", wrap("helper", signature=("a", "b"), anchors=("return a",))),
    patch("whole", wrap("Box", anchors=("def build(",))),
    patch("cached", wrap("cached", signature=("a", "b"), anchors=("return a, b",))),
    patch("code", Code(target=LEAF + ":scope", factory=lambda f: f.__code__, signature=("name",))),
    patch("flag", ThreadLocal(module=LEAF, name="FLAG", default=False, fixed_by=("_flag_tls",))),
    patch("value", Value(target=LEAF + ":TABLE", factory=lambda v: v)),
    patch("create", Value(target=LEAF + ":Box.fresh", factory=lambda v: 1, create=True)),
    patch("first", FirstOf(edits=(wrap("newer", signature=()), wrap("compute")))),
    patch("old", wrap("compute"), affects=">=2.0.0.dev0,<2.5.0.dev0", fixed_in="2.5"),
    patch("young", wrap("compute"), affects=">=3.0.0.dev0"),
    patch("narrow", wrap("gone"), affects=">=2.0.0.dev0,<2.13.0.dev0"),
    patch("probe", wrap("compute"), recognise=state),
    patch("in_c", wrap("compute"), recognise=in_c),
    patch("needs", wrap("compute"), requires=("acme:flag",)),
    patch("absent", Wrap(target="torch.absent:f", factory=lambda f: f)),
    patch("deep", Wrap(target="torch.absent.deeper:f", factory=lambda f: f)),
    patch("elsewhere", Wrap(target="notorch.kernel:f", factory=lambda f: f)),
]
"""

CHANGES: dict[str, tuple[str, str]] = {
    "as it is": ("", ""),
    "renamed": ("def compute(", "def computed("),
    "another signature": ("def compute(x, scale=1)", "def compute(x, scale=1, *, out=None)"),
    "another body": ("return x * scale", "return scale * x"),
    "an unused flag": ("    return FLAG", "    return True"),
    "no flag": ("FLAG", "SIGN"),
    "fixed by a new name": ("FLAG = False", "FLAG = False\n_flag_tls = threading.local()"),
    "a nested class less": ("class Box(Base)", "class Crate(Base)"),
    "no function any more": ("def closing(fn):", "closing = 5\ndef opening(fn):"),
    "a method that is gone": ("def get(self, key):", "get = 5\n\n    def take(self, key):"),
    "not static any more": ("    @staticmethod\n    def make(a)", "    def make(self, a)"),
    "another lock": ("LOCK = threading.RLock()", "LOCK = threading.Lock()"),
    "another table": ("TABLE: dict[int, str] = {}", "TABLE: list[str] = []"),
    "an import under another name": ("import importlib", "import importlib as _importlib"),
    "another base": ("class Box(Base)", "class Box(dict)"),
    "newer": ("def is_on", "def newer(new):\n    return new\n\ndef is_on"),
    "an alternative": ("FLAG = False", "try:\n    FLAG = False\nexcept ValueError:\n    FLAG = 1"),
    "a wrapper": ("@functools.lru_cache(None)", ""),
}


@pytest.fixture
def torch(world: Any) -> Any:
    world.write("torch/leaf.py", LEAF)
    world.write("torch/other.py", OTHER)
    world.write("torch/_C.py", IN_C)
    world.plugin(PLUGIN)
    return world


def states(world: Any, *args: str, **env: str) -> dict[str, str]:
    done = world.run("-m", "torchcompat", *args, "--json", **env)
    assert done.returncode in (0, 1), done.stderr
    return {p["patch"]: p["state"] for p in json.loads(done.stdout)["patches"]}


def verdict(world: Any, patch_id: str, *args: str) -> dict[str, Any]:
    done = world.run("-m", "torchcompat", *args, "--json")
    content = json.loads(done.stdout)
    return next(p for p in content["patches"] if p["patch"] == patch_id)


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_verdicts_as_of_the_plan(torch: Any, change: str) -> None:
    old, new = CHANGES[change]
    assert old in LEAF
    torch.write("torch/leaf.py", LEAF.replace(old, new) if old else LEAF)
    assert states(torch, "check", ".") == states(torch, "plan")


def test_the_verdicts_are_of_all_kinds(torch: Any) -> None:
    found = states(torch, "check", ".")
    own = {i.partition(":")[2]: s for i, s in found.items() if i.startswith("acme:")}
    fine = {i for i, s in own.items() if s == "ok"}
    assert {"compute", "base", "imported", "alias", "code", "flag", "probe", "first"} <= fine
    rest = {i: s for i, s in own.items() if s != "ok"}
    assert rest == {
        "old": "fixed",
        "young": "not_affected",
        "narrow": "not_affected",
        "absent": "missing",
        "deep": "pending",
        "elsewhere": "pending",
    }


@pytest.mark.parametrize("version", ["2.5.0.dev20260101", "2.13.0a0+git1234567", "2.4.1", "odd"])
def test_the_version_decides_as_it_does_for_the_plan(torch: Any, version: str) -> None:
    torch.write("torch/version.py", f"__version__ = {version!r}\n")
    assert states(torch, "check", ".") == states(torch, "plan")


def test_what_is_in_c_is_taken_on_trust_and_never_asked(torch: Any) -> None:
    (torch.folder / "torch/_C.py").unlink()
    found = verdict(torch, "acme:in_c", "check", ".")
    assert found["state"] == "ok"
    assert "by the version: only a run of torch._C:probe tells" in found["evidence"]
    # Past the fault, and no release: nobody says that it is there.
    plugin = PLUGIN.replace("recognise=in_c", "recognise=in_c, affects='>=2.0.0.dev0,<2.9.0.dev0'")
    torch.plugin(plugin)
    torch.write("torch/version.py", "__version__ = '2.13.0.dev1'\n")
    assert verdict(torch, "acme:in_c", "check", ".")["state"] == "not_affected"


def test_nothing_of_the_target_runs(torch: Any) -> None:
    """Neither module bodies nor functions that a patch calls, nor hooks of classes and modules."""
    trap = f"open({str(torch.folder / 'trap')!r}, 'a').close()"
    torch.write("torch/__init__.py", f"{trap}\ndef __getattr__(name):\n    {trap}\n")
    other = OTHER.replace("cls.__init_subclass__ran = True", trap)
    torch.write(
        "torch/other.py", f"{trap}\n{other}\nclass Meta(type):\n    def mro(cls):\n        {trap}\n"
    )
    leaf = LEAF.replace("class Box(Base)", "class Sub(Base, metaclass=Meta): pass\nclass Box(Base)")
    torch.write("torch/leaf.py", f"{trap}\n{leaf}\ndef called():\n    {trap}\n    return 1\n")
    calls = "def in_c():\n    import torch.leaf\n    torch.anything\n    torch.leaf.called()\n"
    torch.plugin(PLUGIN.replace("def in_c():\n", calls))
    found = verdict(torch, "acme:in_c", "check", ".")
    assert not (torch.folder / "trap").exists()
    assert "has no attribute 'anything'" in found["reason"]
    calls = calls.replace("    torch.anything\n", "")
    torch.plugin(PLUGIN.replace("def in_c():\n", calls))
    found = verdict(torch, "acme:in_c", "check", ".")
    assert not (torch.folder / "trap").exists()
    assert "only a run of torch.leaf:called tells" in found["evidence"][0]


def test_the_current_directory_is_no_place_to_import_from(torch: Any) -> None:
    """It may be the torch that is looked at: a checkout has folders of all names."""
    trap = f"open({str(torch.folder / 'trap')!r}, 'a').close()"
    torch.write("elsewhere/packaging/__init__.py", trap)
    torch.write("elsewhere/torch/__init__.py", trap)
    code = """
        import os, sys
        sys.path[:] = [p for p in sys.path if p]
        os.chdir("elsewhere")
        from torchcompat.textual.looking import look_into
        print(look_into(".")["torch"]["version"])
    """
    assert torch.python(code) == "unknown"
    assert not (torch.folder / "trap").exists()


def test_a_process_that_dies_is_one_clear_error(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchcompat.textual import looking

    monkeypatch.setattr(looking, "_START", "import os, sys; os._exit(3)")
    with pytest.raises(ConfigError, match="ended with status 3"):
        looking.look_into(str(torch.folder))
    monkeypatch.setattr(looking, "_START", "import time; time.sleep(60)")
    monkeypatch.setattr(looking, "TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"no end of reading after 0.2 s"):
        looking.look_into(str(torch.folder))


def test_text_that_this_python_cannot_read_is_drift(torch: Any) -> None:
    torch.write("torch/leaf.py", LEAF + "\ndef broken(:\n")
    found = verdict(torch, "acme:compute", "check", ".")
    assert found["state"] == "drifted"
    assert "torch/leaf.py is no text that Python" in found["reason"]
    torch.write("torch/leaf.py", LEAF)
    (torch.folder / "torch/leaf.py").write_bytes(b"x = '\xff\xfe'\n")
    assert "cannot be decoded" in verdict(torch, "acme:compute", "check", ".")["reason"]


def test_exit_status_and_text(torch: Any) -> None:
    done = torch.run("-m", "torchcompat", "check", ".")
    assert done.returncode == 1  # the built-in patches find nothing of theirs in this torch
    assert done.stdout.startswith(".: torch 2.13.0+cpu (release, git cafe1234), read as text\n")
    assert "acme:elsewhere: notorch is not part of ." in done.stdout
    env = {"TORCHCOMPAT_ONLY": "acme:compute"}
    assert torch.run("-m", "torchcompat", "check", ".", **env).returncode == 0
    done = torch.run("-m", "torchcompat", "check", "nowhere.whl")
    assert done.returncode == 2
    assert "nowhere.whl: no such file or folder" in done.stderr
    (torch.folder / "empty").mkdir()
    assert "no torch/__init__.py" in torch.run("-m", "torchcompat", "check", "empty").stderr


def wheel(folder: Path, name: str, start: str = "", **changed: str) -> Path:
    """The fake torch as a wheel, or with `start` before its names."""
    path = folder / name
    files = {"torch/leaf.py": LEAF, "torch/other.py": OTHER, "torch/__init__.py": ""}
    files["torch-2.13.0.dist-info/METADATA"] = "Name: torch\nVersion: 2.13.0\n\nVersion: 9\n"
    files.update({k.replace("__", "/") + ".py": v for k, v in changed.items()})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in files.items():
            archive.writestr(start + file, text)
    return path


def test_a_wheel_a_zip_of_a_checkout_and_a_folder_are_alike(torch: Any) -> None:
    (torch.folder / "torch/_C.py").unlink()
    torch.write("torch/version.py", "__version__ = '2.13.0'\n")
    plain = states(torch, "check", ".")
    assert states(torch, "check", "torch") == plain
    wheel(torch.folder, "torch.whl")
    assert states(torch, "check", "torch.whl") == plain
    wheel(torch.folder, "main.zip", "pytorch-main/")
    with zipfile.ZipFile(torch.folder / "main.zip", "a") as archive:
        archive.writestr("pytorch-main/version.txt", "2.13.0\n")
    assert states(torch, "check", "main.zip") == plain
    unpacked = torch.folder / "venv/lib/python3.11/site-packages"
    with zipfile.ZipFile(torch.folder / "torch.whl") as archive:
        archive.extractall(unpacked)
    assert states(torch, "check", "venv") == plain


def test_against_another_torch(torch: Any) -> None:
    moved = LEAF.replace("x * scale", "scale * x").replace("def make(a)", "def make(a, b)")
    moved = moved.replace("def is_on", "def is_off").replace("FLAG = value", "FLAG = bool(value)")
    wheel(torch.folder, "old.whl")
    wheel(torch.folder, "new.whl", torch__leaf=moved)
    args = ("-m", "torchcompat", "check", "new.whl", "--against", "old.whl")
    against = json.loads(torch.run(*args, "--json").stdout)["against"]
    places = {p["place"]: p for p in against["places"] if p["moved"] != "same"}
    assert {p: c["moved"] for p, c in places.items()} == {
        "torch.leaf:compute": "text changed",
        "torch.leaf:Box": "text changed",
        "torch.leaf:Box.make": "signature changed",
        "torch.leaf:is_on": "gone",
        "torch.leaf:is_off": "new",
        "torch.leaf:turn_on": "text changed",
    }
    assert "acme:compute" in places["torch.leaf:compute"]["patches"]
    assert "-    return x * scale" in places["torch.leaf:compute"]["difference"]
    assert {"patch": "acme:static", "before": "ok", "now": "drifted"} in against["verdicts"]
    out = torch.run(*args).stdout
    assert "acme:static: ok -> drifted" in out
    assert "torch.leaf:is_on: gone (acme:flag)" in out


@pytest.mark.slow
def test_the_installed_torch() -> None:
    """The folder of the torch that is here gives what a fresh `plan` says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("no torch is installed")
    folder = str(Path(spec.origin).parents[1])
    both = []
    for args in (["check", folder], ["plan"]):
        done = subprocess.run(
            [sys.executable, "-m", "torchcompat", *args, "--json"],
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        content = json.loads(done.stdout)
        both.append((content["torch"], {p["patch"]: p["state"] for p in content["patches"]}))
    assert both[0] == both[1]
