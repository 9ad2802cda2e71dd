"""`where`: places of patches, symbols and messages, found in text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchcompat import cli
from torchcompat.textual.search import matches

STATE = '''
"""Detected that this is documentation."""
from torch.fx import flag as other_flag

_flag = False
_table = {}

def is_on():
    return _flag

def shadow(_flag):
    return _flag

def local():
    _flag = 1
    return _flag

class Guard:
    """A guard."""

    level = 1

    def turn(self, value):
        global _flag
        old = _flag
        _flag = value
        if old:
            raise RuntimeError(
                "Detected that two guards "
                f"overlap in {self.name!r}, "
                "which is " + "not " + str(old) + " supported"
            )

        def inner():
            return _flag

        return inner
'''
USER = """
import torch
import torch._dynamo.state
from torch._dynamo import state as s
from torch._dynamo.state import _flag as imported
from .. import _dynamo

def reads():
    return s._flag, imported

def writes():
    torch._dynamo.state._flag = True

def stranger(other):
    return other._flag

def formatted(name):
    raise ValueError("expected %s but found {}" % name)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "torch/__init__.py": "from torch._dynamo.state import Guard as PublicGuard\n",
        "torch/version.py": "__version__ = '2.13.0'\n",
        "torch/_dynamo/__init__.py": "",
        "torch/_dynamo/state.py": STATE,
        "torch/fx/__init__.py": "flag = 1\n",
        "torch/fx/user.py": USER,
        "torch/nn/rare.py": "def only_here():\n    raise ValueError('a rare complaint')\n",
        "torch/nn/broken.py": "def only_here(:\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def where(tree: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(name: str, *args: str) -> list[dict[str, Any]]:
        status = cli.main(["where", name, "--torch", str(tree), "--json", *args])
        out = capsys.readouterr()
        found: list[dict[str, Any]] = json.loads(out.out)["found"]
        assert status == (0 if found else 1)
        return found

    return ask


def test_a_flag_and_who_uses_it(where: Any) -> None:
    for name in ("_flag", "torch._dynamo.state:_flag", "torch._dynamo.state._flag"):
        (found,) = where(name)
        assert (found["place"], found["kind"]) == ("torch._dynamo.state:_flag", "variable")
        assert (found["file"], found["line"]) == ("torch/_dynamo/state.py", 5)
        assert found["reads"] == [
            "torch._dynamo.state:is_on (torch/_dynamo/state.py:9)",
            "torch._dynamo.state:Guard.turn (torch/_dynamo/state.py:25)",
            "torch._dynamo.state:Guard.turn.inner (torch/_dynamo/state.py:35)",
            "torch.fx.user:reads (torch/fx/user.py:9)",
        ]
        assert found["writes"] == [
            "torch._dynamo.state (torch/_dynamo/state.py:5)",
            "torch._dynamo.state:Guard.turn (torch/_dynamo/state.py:26)",
            "torch.fx.user:writes (torch/fx/user.py:12)",
        ]


def test_symbols(where: Any) -> None:
    (found,) = where("Guard.turn", "--context", "1")
    assert (found["line"], found["kind"]) == (23, "function")
    assert (found["first_shown"], found["source"][1]) == (22, "    def turn(self, value):")
    assert where("torch._dynamo.state:Guard.level")[0]["line"] == 21
    assert where("torch.PublicGuard.turn")[0]["place"] == "torch._dynamo.state:Guard.turn"
    assert where("torch:PublicGuard")[0]["kind"] == "class"
    assert where("torch._dynamo.state")[0]["kind"] == "module"
    assert where("only_here")[0]["place"] == "torch.nn.rare:only_here"
    assert where("torch._dynamo.state:other_flag")[0]["place"] == "torch.fx:flag"


def test_a_patch_id(where: Any, tree: Path) -> None:
    (tree / "torch/fx/_symbolic_trace.py").write_text("\n_is_fx_tracing_flag = False\n")
    (found,) = where("fx_tracing_flag")
    assert (found["place"], found["line"]) == ("torch.fx._symbolic_trace:_is_fx_tracing_flag", 2)


@pytest.mark.parametrize(
    "text",
    [
        "Detected that two guards",
        "guards overlap in",  # over the seam of two literals
        "RuntimeError: Detected that two guards overlap in 'mine', which is not False supported",
        "overlap in {}, which is not",
    ],
)
def test_messages(where: Any, text: str) -> None:
    if "{}" in text:  # that is how the hole is shown, not what stands in the source
        assert where(text) == []
        return
    (found,) = where(text)
    assert (found["place"], found["kind"]) == ("torch._dynamo.state:Guard.turn", "message")
    assert (found["line"], found["last_line"]) == (29, 31)


def test_messages_elsewhere(where: Any) -> None:
    assert where("a rare complaint")[0]["place"] == "torch.nn.rare:only_here"
    assert where("expected 5 but found 6 of them")[0]["place"] == "torch.fx.user:formatted"


def test_what_is_not_there(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, hint in (
        ("_flga", "did you mean '_flag'?"),
        ("torch._dynamo.state:Gaurd", "did you mean 'Guard'?"),
        ("Detected two goards that overlap", "nearest: 'Detected that two guards overlap in {}"),
        ("! ?", "no message is like it"),
    ):
        assert cli.main(["where", name, "--torch", str(tree)]) == 1
        assert hint in capsys.readouterr().err


def test_as_text(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["where", "is_on", "--torch", str(tree), "--context", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"torch 2.13.0 (release), {tree}\n")
    assert f"{tree}/torch/_dynamo/state.py:8: function torch._dynamo.state:is_on\n" in out
    assert "     9      return _flag\n" in out
    with pytest.raises(SystemExit) as caught:
        cli.main(["where", "is_on", "--context", "-1"])
    assert caught.value.code == 2


def test_the_installed_torch_is_not_imported(world: Any) -> None:
    world.write("torch/leaf.py", STATE)
    world.write("torch/__init__.py", "raise ImportError('not for a look')\n")
    done = world.run("-m", "torchcompat", "where", "torch.leaf:is_on")
    assert done.returncode == 0, done.stderr
    assert "torch/leaf.py:8: function torch.leaf:is_on" in done.stdout


def test_a_message_that_would_take_for_ever() -> None:
    """Matching is no backtracking: time is the product of the lengths at most."""
    template = "a long beginning " + "{}x" * 40
    assert not matches(template, "a long beginning " + "y" * 4000)
    assert matches(template, "a long beginning " + "yx" * 40)
