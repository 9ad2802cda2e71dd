"""`lock`: what is recorded, what has changed since, and patches that stand back for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchcompat.config import load
from torchcompat.errors import ConfigError
from torchcompat.textual import lock

APPLY = """
    import torch.leaf, torchcompat
    verdict = torchcompat.apply()["acme:negate"]
    print(torch.leaf.compute(2, 3), verdict.state.value, verdict.reason)
"""
LATER = """
    import torchcompat
    print(torchcompat.apply()["acme:negate"].state.value)
    import torch.leaf
    print(torch.leaf.compute(2, 3))
"""


def run(world: Any, *args: str, **env: str) -> Any:
    return world.run("-m", "torchcompat", "lock", *args, **env)


def change_leaf(world: Any, old: str = "return x * scale", new: str = "return scale * x") -> None:
    leaf: Path = world.folder / "torch/leaf.py"
    assert old in leaf.read_text()
    leaf.write_text(leaf.read_text().replace(old, new))


@pytest.fixture
def locked(world: Any) -> Any:
    done = run(world)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torchcompat.lock: 1 places of torch 2.13.0+cpu")
    return world


def test_what_is_recorded(locked: Any) -> None:
    content = json.loads((locked.folder / "torchcompat.lock").read_text())
    assert content["patches"]["acme:negate"] == ["torch.leaf:compute"]
    place = content["places"]["torch.leaf:compute"]
    assert place["signature"] == ["x", "scale"]
    assert place["text"] == ["def compute(x, scale=1):", '    "Multiply."', "    return x * scale"]
    assert "torch/leaf.py" in content["files"]
    assert content["torch"]["version"] == "2.13.0+cpu"


def test_nothing_has_changed(locked: Any) -> None:
    done = run(locked, "--check")
    assert done.returncode == 0
    assert "0 places changed of 1 recorded" in done.stdout
    # Elsewhere in the file, and another version: the place is the same.
    change_leaf(locked, 'FLAG = "stock"', 'FLAG = "other"')
    locked.write("torch/version.py", "__version__ = '2.14.0'\n")
    assert run(locked, "--check").returncode == 0


def test_what_has_changed_is_shown(locked: Any) -> None:
    change_leaf(locked)
    done = run(locked, "--check")
    assert done.returncode == 1
    assert "torch.leaf:compute: text changed (acme:negate)" in done.stdout
    assert "    -    return x * scale\n    +    return scale * x\n" in done.stdout
    (changed,) = json.loads(run(locked, "--check", "--json").stdout)["changed"]
    assert changed["moved"] == "text changed"
    change_leaf(locked, "def compute(x, scale=1)", "def compute(x, by=1)")
    assert "signature changed" in run(locked, "--check").stdout
    change_leaf(locked, "def compute(", "def computed(")
    assert "torch.leaf:compute: gone (acme:negate)" in run(locked, "--check").stdout


def test_another_file_and_another_torch(locked: Any) -> None:
    (locked.folder / "other").mkdir()
    (locked.folder / "torch").rename(locked.folder / "other/torch")
    assert run(locked, "--check", "--torch", "other").returncode == 0
    assert run(locked, "x.lock", "--torch", "other").returncode == 0
    assert (locked.folder / "x.lock").is_file()
    assert run(locked, "--torch", "other", TORCHCOMPAT_LOCK="y.lock").returncode == 0
    assert (locked.folder / "y.lock").is_file()


def test_a_patch_stands_back_where_its_place_has_changed(locked: Any) -> None:
    use = {"TORCHCOMPAT_LOCK": "torchcompat.lock"}
    assert locked.python(APPLY, **use).startswith("-6 applied")
    change_leaf(locked)
    assert locked.python(APPLY).startswith("-6 applied")  # without the setting
    out = locked.python(APPLY, **use)
    assert out.startswith("6 drifted torch.leaf:compute is not as torchcompat.lock recorded it")
    plan = locked.run("-m", "torchcompat", "plan", "--json", **use)
    states = {p["patch"]: p["state"] for p in json.loads(plan.stdout)["patches"]}
    assert states["acme:negate"] == "drifted"
    # also when its module comes later
    assert locked.python(LATER, **use) == "drifted\n6"


def test_only_the_patches_of_changed_places_stand_back(locked: Any) -> None:
    """A file that differs is not enough, and a patch that the lock does not know is free."""
    use = {"TORCHCOMPAT_LOCK": "torchcompat.lock"}
    change_leaf(locked, 'FLAG = "stock"', 'FLAG = "other"')
    assert locked.python(APPLY, **use).startswith("-6 applied")
    content = json.loads((locked.folder / "torchcompat.lock").read_text())
    del content["patches"]["acme:negate"]
    (locked.folder / "torchcompat.lock").write_text(json.dumps(content))
    change_leaf(locked)
    assert locked.python(APPLY, **use).startswith("-6 applied")


def test_equal_files_are_not_looked_into(locked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcompat.build import TorchBuild

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("looked into")

    monkeypatch.setattr(lock, "look_into", fail)
    build = TorchBuild.of("2.13.0", path=str(locked.folder / "torch"))
    path = str(locked.folder / "torchcompat.lock")
    assert lock.standing_back(path, build) == {}
    lock._standing_back.cache_clear()
    change_leaf(locked)
    with pytest.raises(AssertionError, match="looked into"):
        lock.standing_back(path, build)


def test_a_torch_that_cannot_be_compared_is_changed(
    locked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchcompat.build import TorchBuild

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no process to look")

    monkeypatch.setattr(lock, "look_into", fail)
    change_leaf(locked)
    build = TorchBuild.of("2.13.0", path=str(locked.folder / "torch"))
    held = lock.standing_back(str(locked.folder / "torchcompat.lock"), build)
    assert "cannot be compared: no process to look" in held["acme:negate"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "write one with `python -m torchcompat lock"),
        ("{", "is no JSON"),
        ("[]", "is not of format 1"),
        ('{"format": 2}', "is not of format 1"),
        ('{"format": 1}', "is incomplete"),
        ('{"format":1,"torch":{},"files":{},"patches":{},"places":{"a:b":{}}}', "no fingerprint"),
        ('{"format":1,"torch":{},"files":{},"patches":{"p":["a:b"]},"places":{}}', "unknown place"),
    ],
)
def test_a_file_that_is_no_lock(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.lock"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="lock file") as caught:
        lock.read(path)
    assert message in str(caught.value)


def test_a_setting_without_a_file_is_an_error(world: Any) -> None:
    done = world.run("-m", "torchcompat", "plan", TORCHCOMPAT_LOCK="gone.lock")
    assert done.returncode == 2
    assert "lock file gone.lock: No such file or directory" in done.stderr


def test_the_setting(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.torchcompat]\nlock = "a/b.lock"\n')
    settings = load({}, tmp_path)
    assert settings.lock == str(tmp_path / "a/b.lock")
    assert any(line.startswith("lock = ") for line in settings.lines())
    assert load({"TORCHCOMPAT_LOCK": "c.lock"}, tmp_path).lock == "c.lock"
    (tmp_path / "pyproject.toml").write_text("[tool.torchcompat]\nlock = 3\n")
    with pytest.raises(ConfigError, match="it must be the path of a lock file"):
        load({}, tmp_path)


def test_unused_it_costs_no_import(world: Any) -> None:
    out = world.python("""
        import sys, torchcompat
        torchcompat.apply()
        print([m for m in sys.modules if m.startswith("torchcompat.textual")])
    """)
    assert out == "[]"
