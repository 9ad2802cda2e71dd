"""What starting costs, by structure: which modules are loaded, what is done once. The times are in
`benchmarks/startup_cost.py`."""

from __future__ import annotations

import pytest

import torchcompat
from torchcompat import rewrite
from torchcompat.rewrite import ThreadLocal

LOADED = "import sys; before = set(sys.modules); {}; print(*sorted(set(sys.modules) - before))"


def test_the_package_alone_loads_nothing(world):
    assert world.python(LOADED.format("import torchcompat")) == "torchcompat"


def test_names_are_loaded_when_used_and_no_torch_with_them(world):
    code = "from torchcompat import *; import torchcompat; torchcompat.plan; torchcompat.explain"
    loaded = world.python(LOADED.format(code)).split()
    assert {"torchcompat.api", "torchcompat.rewrite"} <= set(loaded)
    heavy = {"torch", "packaging", "importlib.metadata", "difflib", "tomllib", "json", "argparse"}
    assert not heavy & set(loaded)


def test_apply_imports_no_torch(world):
    loaded = world.python(LOADED.format("import torchcompat; torchcompat.apply()")).split()
    assert "torchcompat.patches" in loaded
    assert not {"torch", "difflib", "email.feedparser", "argparse"} & set(loaded)


def test_every_public_name_is_there_under_its_public_module(world):
    code = """
    import torchcompat
    homes = [name for names in torchcompat._HOMES.values() for name in names]
    assert sorted(homes) == sorted(torchcompat.__all__), set(homes) ^ set(torchcompat.__all__)
    assert set(homes) <= set(dir(torchcompat))
    for name in homes:
        value = getattr(torchcompat, name)
        assert getattr(value, "__module__", "torchcompat") == "torchcompat" or name == "MISSING"
    """
    world.python(code)


def test_an_error_has_its_public_name_though_only_apply_was_used(world):
    done = world.run("-c", "import torchcompat; torchcompat.apply(only=['x'])")
    assert done.stderr.splitlines()[-1].startswith("torchcompat.ConfigError: only=: unknown patch")


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="'torchcompat' has no attribute 'aply'"):
        torchcompat.aply  # noqa: B018


COUNTER = """
_flag = 1

def read():
    return _flag

def write(value):
    global _flag
    _flag = value
"""


@pytest.fixture
def rewritten(monkeypatch):
    """The names of the functions, each time that one is rewritten."""
    names = []
    real = rewrite._without_globals

    def noting(function, globals_):
        names.append(function.__name__)
        return real(function, globals_)

    monkeypatch.setattr(rewrite, "_without_globals", noting)
    return names


def test_a_function_is_rewritten_once_for_the_look_and_the_making(lib, rewritten):
    module = lib.load(lib.write("counter", COUNTER).rpartition(".")[2])
    edit = ThreadLocal(module=module.__name__, name="_flag", default=1)
    assert edit.inspect().kind == "ok"
    slots = edit.build()
    assert rewritten == ["read", "write"]
    assert len(slots) == 4
    edit.build()  # what was kept is used up
    assert rewritten == ["read", "write"] * 2


def test_what_a_look_made_is_not_used_for_a_module_that_has_changed(lib, rewritten):
    module = lib.load(lib.write("counter", COUNTER).rpartition(".")[2])
    edit = ThreadLocal(module=module.__name__, name="_flag", default=1)
    edit.inspect()
    module.read.__code__ = module.read.__code__.replace(co_name="other")
    module.read.__code__ = module.read.__code__.replace(co_name="read")
    edit.build()
    assert len(rewritten) == 4
    edit.inspect()
    exec(compile(COUNTER, module.__file__, "exec"), vars(module))
    slots = edit.build()
    assert len(rewritten) == 8
    assert slots[0].function is module.read
