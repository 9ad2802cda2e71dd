"""The ways to have the patches without a line of code, with a torch that calls us at its end."""

from __future__ import annotations

import pytest

ONLY = {"TORCHCOMPAT_ONLY": "acme:negate"}  # the fake torch has nothing for our own patches
ON = {"TORCHCOMPAT_AUTO": "1", **ONLY}
COMPUTE = "import torch.leaf; print(torch.leaf.compute(1))"
LOADED = "import sys, torch; print(sorted(n for n in sys.modules if n.startswith('torchcompat')))"
SHUT = "['torchcompat', 'torchcompat.autoload']"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TORCHCOMPAT_AUTO": ""},
        {"TORCHCOMPAT_AUTO": "0"},
        {"TORCHCOMPAT_AUTO": " OFF "},
        {"TORCHCOMPAT_AUTO": "1", "TORCHCOMPAT": "off"},
        {"TORCHCOMPAT_AUTO": "1", "TORCHCOMPAT": "0"},
        {"TORCHCOMPAT_AUTO": "nonsense"},
    ],
    ids=str,
)
def test_shut_loads_nothing_more(world, env):
    world.door()
    assert world.python(LOADED, **env) == SHUT


def test_shut_loads_no_other_module_than_torch_does(world):
    """Beside the two modules of ours, what is loaded is what a torch without us loads."""
    code = "import sys, torch; print(*sorted(sys.modules))"
    world.write("torch/__init__.py", "import contextlib, importlib.metadata, os")
    without = world.python(code).split()
    world.door()
    world.write(
        "torch/__init__.py",
        "import contextlib\n" + (world.folder / "torch/__init__.py").read_text(),
    )
    assert set(world.python(code).split()) - set(without) == {"torchcompat", "torchcompat.autoload"}


@pytest.mark.parametrize("value", ["1", "on", " ON "])
def test_open(world, value):
    world.door()
    done = world.run("-c", COMPUTE, **{**ON, "TORCHCOMPAT_AUTO": value})
    assert (done.stdout, done.stderr, done.returncode) == ("-1\n", "", 0)


def test_a_value_that_means_nothing_is_told_once(world):
    world.door()
    code = f"import torchcompat.autoload as a; a.init(); {COMPUTE}"
    done = world.run("-c", code, TORCHCOMPAT_AUTO="ja")
    assert (done.stdout, done.returncode) == ("1\n", 0)
    assert done.stderr == (
        "torchcompat: TORCHCOMPAT_AUTO is 'ja'; it can be 1 or 0. Nothing is applied.\n"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("PATCHES = [1]", "PluginError: 1 is no torchcompat.Patch"),
        ("this is no python", "SyntaxError"),
    ],
)
def test_a_broken_plugin_breaks_neither_torch_nor_the_others(world, source, reason):
    world.door()
    world.plugin(source, "broken")
    done = world.run("-c", COMPUTE, **ON)
    assert (done.stdout, done.returncode) == ("-1\n", 0), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("not applied: broken failed: ")
    assert reason in line


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"TORCHCOMPAT": "yes"}, "ConfigError: TORCHCOMPAT is 'yes'; it can be on, off or strict"),
        ({"TORCHCOMPAT_DISABLE": "acme:negat"}, "unknown patch 'acme:negat', did you mean"),
        ({"TORCHCOMPAT_DISABEL": "x"}, "did you mean 'TORCHCOMPAT_DISABLE'?"),
    ],
)
def test_a_setting_that_means_nothing_leaves_torch_alone(world, env, reason):
    world.door()
    done = world.run("-c", COMPUTE, **{**ON, **env})
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("torchcompat: the patches are not applied: ")
    assert reason in line


def test_strict_cannot_raise_out_of_import_torch(world):
    world.door()
    world.write("torch/leaf.py", "def compute(x, other): return x")
    code = f"import torch.leaf; import torch; {COMPUTE}".replace("(1)", "(1, 2)")
    world.write(
        "torch/__init__.py",
        "import torch.leaf\n" + (world.folder / "torch/__init__.py").read_text(),
    )
    done = world.run("-c", code, **ON, TORCHCOMPAT="strict")
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    assert "PatchNotApplied: patch 'acme:negate' is drifted" in done.stderr


def test_the_users_interrupt_is_the_users(world):
    world.door()
    world.plugin("raise KeyboardInterrupt", "broken")
    done = world.run("-c", COMPUTE, **ON)
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr


def test_no_stderr_is_no_reason_to_fail(world):
    world.door()
    code = "import sys; sys.stderr = None; import torch; print(1)"
    assert world.python(code, TORCHCOMPAT_AUTO="ja") == "1"


@pytest.mark.parametrize(
    "code", ["import torchcompat.auto, torch", "import torch, torchcompat.auto"]
)
def test_import_auto(world, code):
    assert world.python(f"{code}; {COMPUTE}", **ONLY) == "-1"
    assert world.python(f"{code}; {COMPUTE}", **ONLY, TORCHCOMPAT_AUTO="0") == "1"


MULTI = """
import multiprocessing, sys

def work(_):
    import torch.leaf
    return torch.leaf.compute(1)

if __name__ == "__main__":
    if sys.argv[2] == "early":
        import torch.leaf
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(work, range(2)))
"""


@pytest.mark.parametrize("moment", ["early", "late"])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_are_patched(world, method, moment):
    world.door()
    done = world.run(str(world.write("multi.py", MULTI)), method, moment, **ON)
    assert (done.stdout, done.stderr) == ("[-1, -1]\n", "")
