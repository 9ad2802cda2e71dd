"""The pytest plugin, in runs of pytest of their own over a fake torch."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import distributions
from typing import Any

import pytest

from torchcompat import pytest_plugin

# As installed; a checkout on the path has to name it.
INSTALLED = any(
    (e.group, e.name) == ("pytest11", "torchcompat")
    for d in distributions()
    for e in d.entry_points
)
PLUGIN = () if INSTALLED else ("-p", "torchcompat.pytest_plugin")

PATCHES_TEXT = """
from torchcompat import Patch, Wrap

def negate(original):
    def new(x, scale=1):
        return -original(x, scale)
    return new

def make(id, repro=None, affects=">=2.0.0.dev0", **fields):
    edit = Wrap(target="torch.leaf:compute", factory=negate, **fields)
    return Patch(id=f"acme:{id}", title="t", why="w", affects=affects, edits=(edit,), repro=repro)

PATCHES = [make("negate", "faulty.py")]
"""


@pytest.fixture
def acme(world: Any) -> Any:
    world.write("acme_patches/__init__.py", PATCHES_TEXT)
    for name, status in (("faulty", 1), ("right", 0), ("silent", 2)):
        text = f"print('the program is {name}')\nraise SystemExit({status})\n"
        world.write(f"acme_patches/{name}.py", text)
    world.plugin("", value="acme_patches:PATCHES")
    world.write("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider --strict-markers\n")
    return world


def run(world: Any, test: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    if test:
        world.write("test_it.py", test)
    done: subprocess.CompletedProcess[str] = world.run("-m", "pytest", *PLUGIN, *args, **env)
    return done


def counted(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    last = done.stdout.strip().splitlines()[-1]
    assert all(text in last for text in expected), done.stdout + done.stderr


def test_unused_it_imports_neither_torch_nor_the_engine(acme: Any) -> None:
    done = run(
        acme,
        """
        import sys
        def test_it():
            ours = sorted(m for m in sys.modules if m.partition(".")[0] == "torchcompat")
            assert "torchcompat.pytest_plugin" in ours
            assert set(ours) <= {"torchcompat", "torchcompat.pytest_plugin", "torchcompat.build"}
            assert "torch" not in sys.modules
        """,
    )
    counted(done, "1 passed")
    assert (
        "torchcompat: torch 2.13.0+cpu (release, git cafe1234), patches applied: 0" in done.stdout
    )


def test_a_broken_installation_breaks_nobodys_run(acme: Any) -> None:
    acme.write("wrapt/__init__.py", "raise RuntimeError('broken')\n")
    (acme.folder / "torch/version.py").write_bytes(b"\xff\xfe no text")
    done = run(acme, "def test_it(): pass")
    counted(done, "1 passed")
    assert "torchcompat: UnicodeDecodeError" in done.stdout


def test_the_header_counts_the_patches_that_a_conftest_applied(acme: Any) -> None:
    acme.write(
        "conftest.py", "import torch.leaf, torchcompat\ntorchcompat.apply(only=['acme:negate'])"
    )
    done = run(acme, "def test_it(): pass")
    counted(done, "1 passed")
    assert "patches applied: 1" in done.stdout


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        (">=2.11,<2.14", "1 passed"),
        (">=2.13", "1 passed"),
        ("<2.13", "1 skipped"),
        (">=2.14", "1 skipped"),
        (">=2.14.0.dev20260715", "1 skipped"),
    ],
)
def test_a_test_for_some_torch(acme: Any, bounds: str, outcome: str) -> None:
    text = f"""
        import pytest
        @pytest.mark.torchcompat_torch({bounds!r})
        def test_it(): pass
        """
    done = run(acme, text, "-rs")
    counted(done, outcome)
    if "skipped" in outcome:
        assert f"torch 2.13.0+cpu is outside {bounds}" in done.stdout


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("2.13.0+cpu", True),
        ("2.14.0.dev20260601+cpu", False),  # the nightlies of 2.14 are in ">=2.14"
        ("2.14.0a0+nv26.10", False),
    ],
)
def test_a_short_bound_ends_before_the_nightlies(
    monkeypatch: pytest.MonkeyPatch, version: str, inside: bool
) -> None:
    from torchcompat.build import TorchBuild

    monkeypatch.setattr(pytest_plugin, "_build", lambda: TorchBuild.of(version))
    assert (pytest_plugin.outside(pytest.mark.torchcompat_torch("<2.14").mark) is None) == inside
    assert (pytest_plugin.outside(pytest.mark.torchcompat_torch(">=2.14").mark) is None) != inside


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("torchcompat_torch('2.13')", "write '>=X.Y.Z.dev0'"),
        ("torchcompat_torch('==2.13')", "write '>=X.Y.Z.dev0'"),
        ("torchcompat_torch()", "takes one text"),
        ("torchcompat_patches(of=False)", "takes ids and on=True or False"),
        ("torchcompat_patches(3)", "takes ids, not (3,)"),
    ],
)
def test_a_marker_that_means_nothing_ends_the_run(acme: Any, marker: str, said: str) -> None:
    done = run(acme, f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    assert done.returncode == 4
    assert "test_it.py::test_it: marker torchcompat_" in done.stderr
    assert said in done.stderr


MARKED = """
import pytest
import torch.leaf
import torchcompat

stock = torch.leaf.compute

def is_on():
    return torch.leaf.compute(2) == -2

@pytest.mark.torchcompat_patches("acme:negate")
def test_on():
    assert is_on()

def test_restored():
    assert torch.leaf.compute is stock

@pytest.mark.torchcompat_patches("acme:negate")
def test_on_and_failing():
    raise ZeroDivisionError

def test_restored_too():
    assert torch.leaf.compute is stock

@pytest.fixture(scope="module")
def applied():
    with torchcompat.applied(only=["acme:negate"]):
        yield

@pytest.mark.usefixtures("applied")
class TestOff:
    def test_before(self):
        assert is_on()

    @pytest.mark.torchcompat_patches(on=False)
    def test_off(self):
        assert torch.leaf.compute is stock

    def test_after(self):
        assert is_on()

def test_in_turns(torchcompat_patches, applied):
    assert is_on()
    torchcompat_patches.off()
    assert torch.leaf.compute is stock
    torchcompat_patches.on("acme:negate")
    assert is_on()
    torchcompat_patches.off("acme:negate")

def test_on_again():
    assert is_on()

@pytest.mark.torchcompat_patches("acme:negat")
def test_of_no_patch(): pass
"""


def test_patches_on_and_off_for_one_test(acme: Any) -> None:
    done = run(acme, MARKED, "-rfE")
    counted(done, "1 failed", "8 passed", "1 error")
    assert "FAILED test_it.py::test_on_and_failing - ZeroDivisionError" in done.stdout
    assert "unknown patch 'acme:negat', did you mean 'acme:negate'?" in done.stdout


def test_patches_that_are_switched_off_are_no_failure(acme: Any) -> None:
    text = """
    import pytest
    @pytest.mark.torchcompat_patches
    def test_on(): raise AssertionError
    """
    done = run(acme, text, "-rs", TORCHCOMPAT="off")
    counted(done, "1 skipped")
    assert "patches are switched off by TORCHCOMPAT" in done.stdout


def test_check_makes_items_for_every_patch(acme: Any) -> None:
    text = PATCHES_TEXT.replace(
        'make("negate", "faulty.py")',
        'make("here", "faulty.py"), make("gone", "right.py"), make("silent", "silent.py"), '
        'make("old", "right.py", affects="<2.0.0.dev0"), make("drifted", signature=("y",))',
    )
    acme.write("acme_patches/__init__.py", text)
    done = run(
        acme, "def test_it(): pass", "--torchcompat-check", "-vv", "-rs", "-k", "acme or test_it"
    )
    out = done.stdout
    for line in (
        "test_it.py::test_it PASSED",
        "torchcompat::drift[acme:here] PASSED",
        "torchcompat::drift[acme:drifted] FAILED",
        "torchcompat::drift[acme:old] PASSED",
        "torchcompat::still-needed[acme:here] PASSED",
        "torchcompat::still-needed[acme:gone] FAILED",
        "torchcompat::still-needed[acme:silent] SKIPPED",
        "torchcompat::still-needed[acme:old] SKIPPED",
    ):
        assert line in out, out
    assert "still-needed[acme:drifted]" not in out  # it brings no program
    assert "acme:gone is not needed any more on this torch" in out
    assert "acme:drifted is drifted: torch.leaf:compute" in out
    assert "the program is silent" in out
    counted(done, "2 failed", "6 passed", "2 skipped")


def test_a_plugin_that_does_not_load_fails_its_drift_item(acme: Any) -> None:
    acme.write("acme_patches/__init__.py", "raise OSError('no disk')")
    done = run(acme, "", "--torchcompat-check", "-vv", "-k", "acme")
    counted(done, "1 failed")
    assert "torchcompat::drift[acme]" in done.stdout
    assert "OSError: no disk" in done.stdout


def test_without_the_option_there_is_no_check(acme: Any) -> None:
    counted(run(acme, "def test_it(): pass"), "1 passed")


LEAKY = """
import sys
import pytest
import torch.leaf
import torchcompat
import torch.nn.modules.module, torch.fx._symbolic_trace, torch.utils._python_dispatch

@pytest.fixture
def borrowed():
    with torchcompat.applied(only=["acme:negate"]):
        yield

@pytest.fixture(scope="class")
def wider():
    with torchcompat.applied(only=["acme:negate"]):
        yield

def test_clean(borrowed): pass

class TestWider:
    def test_first(self, wider): pass
    def test_second(self, wider): pass

class TestLeaks:
    def test_patches(self): torchcompat.apply(only=["acme:negate"])
    def test_taken(self): torchcompat.unapply()
    def test_call(self, monkeypatch):
        torch.nn.modules.module.Module.__call__ = lambda self: None
    def test_code(self):
        def other(self, name): pass
        torch.nn.modules.module.Module.__getattr__.__code__ = other.__code__
    def test_flag(self): torch.fx._symbolic_trace._is_fx_tracing_flag = True
    def test_patcher(self): torch.fx._symbolic_trace.CURRENT_PATCHER = object()
    def test_mode(self): torch.utils._python_dispatch._is_in_torch_dispatch_mode = True
    def test_finder(self): sys.meta_path.append(Finder())

class Finder:
    def find_spec(self, *args): return None

def test_undone(monkeypatch):
    monkeypatch.setattr(torch.nn.modules.module.Module, "__call__", None)

def test_a_finder_that_comes_with_an_import(): import brings_a_finder
"""


@pytest.mark.parametrize("how", ["option", "ini"])
def test_what_a_test_leaves_behind_is_an_error(acme: Any, how: str) -> None:
    module = """
    class Module:
        def __call__(self): pass
        def __getattr__(self, name): raise AttributeError(name)
    """
    acme.write("torch/nn/__init__.py", "")
    acme.write("torch/nn/modules/__init__.py", "")
    acme.write("torch/nn/modules/module.py", module)
    acme.write("torch/fx/__init__.py", "")
    flags = "_is_fx_tracing_flag = False\nCURRENT_PATCHER = None\n"
    acme.write("torch/fx/_symbolic_trace.py", flags)
    acme.write("torch/utils/__init__.py", "")
    acme.write("torch/utils/_python_dispatch.py", "_is_in_torch_dispatch_mode = False\n")
    finder = (
        "import sys\nclass F:\n def find_spec(self, *a): return None\nsys.meta_path.append(F())\n"
    )
    acme.write("brings_a_finder.py", finder)
    if how == "ini":
        acme.write(
            "pytest.ini", "[pytest]\naddopts = -p no:cacheprovider\ntorchcompat_leaks = true\n"
        )
    done = run(acme, LEAKY, "-rE", *(["--torchcompat-leaks"] if how == "option" else []))
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR test_it")]
    said = {line.split(" - ")[0].rpartition("::")[2] for line in errors}
    names = ["patches", "taken", "call", "code", "flag", "patcher", "mode", "finder"]
    assert said == {f"test_{name}" for name in names}, done.stdout
    for text in (
        "the test left behind: patches applied: acme:negate (use",
        "patches taken away: acme:negate",
        "nn.Module.__call__ is test_it.TestLeaks.test_call.<locals>.<lambda>",
        "nn.Module.__getattr__ is torch.nn.modules.module.Module.__getattr__ of",
        "torch.fx._symbolic_trace._is_fx_tracing_flag is True",
        "torch.fx._symbolic_trace.CURRENT_PATCHER is",
        "torch.utils._python_dispatch._is_in_torch_dispatch_mode is True",
        "sys.meta_path holds test_it.Finder",
    ):
        assert text in done.stdout, text
    counted(done, "13 passed", "8 errors")
    counted(run(acme, LEAKY, "-c", "/dev/null", "-p", "no:cacheprovider"), "13 passed")


def test_the_entry_point_is_declared() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\ntorchcompat = "torchcompat.pytest_plugin"' in text
    assert json.dumps(pytest_plugin.TORCH) == '"torchcompat_torch"'
