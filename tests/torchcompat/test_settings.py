"""Layers of settings, and the errors for what means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchcompat.config import Settings, load
from torchcompat.errors import ConfigError


def pyproject(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_bytes(text.encode("latin-1"))


def test_defaults(tmp_path: Path) -> None:
    assert load({}, tmp_path) == Settings()
    assert load({"TORCHCOMPAT": ""}, tmp_path) == Settings()
    assert Settings().lines()[0] == "mode = on (default)"


@pytest.mark.parametrize(
    "text",
    [
        '[ tool . "torchcompat" ]\nmode = "off"',
        "[tool]\ntorchcompat.mode = 'off'",
        "[tool]\n  'torchcompat' = {mode = 'off'}",
        "tool = {x = 1, torchcompat = {mode = 'off'}}",
        "tool.torchcompat.mode = 'off'",
    ],
)
def test_a_table_in_whatever_form(tmp_path: Path, text: str) -> None:
    pyproject(tmp_path, text)
    assert load({}, tmp_path).mode == "off"


def test_file_below_environment(tmp_path: Path) -> None:
    text = '[tool.torchcompat]\nmode = "strict"\ndisable = ["a", "b"]\nplugins = "none"\n'
    pyproject(tmp_path, text)
    deep = tmp_path / "x" / "y"
    deep.mkdir(parents=True)
    settings = load({"TORCHCOMPAT": "1", "TORCHCOMPAT_ONLY": "c, d"}, deep)
    assert (settings.mode, settings.disable) == ("on", ("a", "b"))
    assert (settings.only, settings.plugins) == (("c", "d"), "none")
    assert settings.where("mode") == "TORCHCOMPAT"
    assert settings.where("disable").endswith("pyproject.toml [tool.torchcompat] disable")
    assert "only = c, d (TORCHCOMPAT_ONLY)" in settings.lines()


def test_what_to_do_at_the_recompile_limit(tmp_path: Path) -> None:
    pyproject(tmp_path, '[tool.torchcompat]\non_recompile_limit = "error"\n')
    assert load({}, tmp_path).on_recompile_limit == "error"
    environ = {"TORCHCOMPAT_ON_RECOMPILE_LIMIT": "Warn"}
    settings = load(environ, tmp_path)
    assert settings.on_recompile_limit == "warn"
    assert "on_recompile_limit = warn (TORCHCOMPAT_ON_RECOMPILE_LIMIT)" in settings.lines()
    with pytest.raises(ConfigError, match="RECOMPILE_LIMIT is 'stop'; it can be warn or error"):
        load({"TORCHCOMPAT_ON_RECOMPILE_LIMIT": "stop"}, tmp_path)


def test_the_nearest_file_counts_and_need_not_be_ours(tmp_path: Path) -> None:
    pyproject(tmp_path, '[tool.torchcompat]\nmode = "off"\n')
    pyproject(tmp_path / "sub", "this is = not TOML [")
    assert load({}, tmp_path / "sub") == Settings()


@pytest.mark.parametrize(
    ("env", "mode"),
    [("on", "on"), ("1", "on"), ("OFF", "off"), ("0", "off"), (" strict ", "strict")],
)
def test_modes(tmp_path: Path, env: str, mode: str) -> None:
    assert load({"TORCHCOMPAT": env}, tmp_path).mode == mode


@pytest.mark.parametrize(
    ("env", "plugins"), [("auto", "auto"), ("none", "none"), ("a,b", ("a", "b")), (" ", "auto")]
)
def test_plugins(tmp_path: Path, env: str, plugins: object) -> None:
    assert load({"TORCHCOMPAT_PLUGINS": env}, tmp_path).plugins == plugins


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TORCHCOMPAT": "yes"}, "TORCHCOMPAT is 'yes'; it can be on, off or strict"),
        ({"TORCHCOMPAT_DISABEL": "x"}, "TORCHCOMPAT_DISABEL: did you mean 'TORCHCOMPAT_DISABLE'"),
        ({"TORCHCOMPAT_AUT": "x"}, "TORCHCOMPAT_AUT: did you mean 'TORCHCOMPAT_AUTO'"),
        ({"TORCHCOMPAT_ZZZZ_QQQQQQQ": ""}, "_QQQQQQQ: known: .*TORCHCOMPAT_AUTO.*_PLUGINS"),
    ],
)
def test_environment_that_means_nothing(tmp_path: Path, env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(env, tmp_path)


def test_variables_read_elsewhere(tmp_path: Path) -> None:
    ours = {"TORCHCOMPAT_REPRO_APPLY": "1", "TORCHCOMPAT_AUTO": "1"}
    assert load({**ours, "TORCHCOMPATIBLE": "theirs"}, tmp_path) == Settings()


def test_off_is_off_whatever_else_is_wrong(tmp_path: Path) -> None:
    pyproject(tmp_path, "[tool.torchcompat]\nmoed = 'on'")
    settings = load({"TORCHCOMPAT": "off", "TORCHCOMPAT_DISABEL": "x"}, tmp_path)
    assert (settings.mode, settings.where("mode")) == ("off", "TORCHCOMPAT")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.torchcompat]\nmoed = 'on'", "moed: unknown key, did you mean 'mode'"),
        ("[tool.torchcompat]\nmode = 1", "mode is 1; it can be"),
        ("[tool.torchcompat]\ndisable = 3", "disable is 3; it must be a list"),
        ("[tool.torchcompat]\ndisable = [3]", "must be a list of names"),
        ("[tool.torchcompat\n", "is no TOML"),
        ("[tool.torchcompat]\n# \xff", "is no TOML"),
        ("[tool]\ntorchcompat = 1", "tool.torchcompat is 1; it must be a table"),
    ],
)
def test_file_that_means_nothing(tmp_path: Path, text: str, message: str) -> None:
    pyproject(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        load({}, tmp_path)
