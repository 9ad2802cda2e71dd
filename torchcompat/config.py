"""Settings: defaults < [tool.torchcompat] in pyproject.toml < environment < arguments.

mode      TORCHCOMPAT          on, off or strict (also 1, 0)
disable   TORCHCOMPAT_DISABLE  patch ids never to apply
only      TORCHCOMPAT_ONLY     patch ids to apply, and no others
plugins   TORCHCOMPAT_PLUGINS  auto, none, or the names of the entry points to load
lock      TORCHCOMPAT_LOCK     a file of `python -m torchcompat lock`: what has changed since is not
                               patched; in pyproject.toml relative to its folder
on_recompile_limit             TORCHCOMPAT_ON_RECOMPILE_LIMIT: warn or error, where torch stops
                               compiling a function because it has too many versions already

TORCHCOMPAT_AUTO is no setting: `autoload` reads it before anything of this package is loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from torchcompat.errors import ConfigError, nearest

Mode = Literal["on", "off", "strict"]
OnLimit = Literal["warn", "error"]

ENVIRONMENT: Final = {
    "TORCHCOMPAT": "mode",
    "TORCHCOMPAT_DISABLE": "disable",
    "TORCHCOMPAT_ONLY": "only",
    "TORCHCOMPAT_PLUGINS": "plugins",
    "TORCHCOMPAT_LOCK": "lock",
    "TORCHCOMPAT_ON_RECOMPILE_LIMIT": "on_recompile_limit",
}
_PREFIX: Final = "TORCHCOMPAT_"
# Ours as well, but read elsewhere.
_OTHERS: Final = ("TORCHCOMPAT_AUTO", "TORCHCOMPAT_REPRO_APPLY")
_MODES: Final[dict[str, Mode]] = {
    "on": "on",
    "1": "on",
    "off": "off",
    "0": "off",
    "strict": "strict",
}

_ON_LIMIT: Final[dict[str, OnLimit]] = {"warn": "warn", "error": "error"}


@dataclass(frozen=True)
class Settings:
    """What holds, and in `origin` which layer said so, by field name."""

    mode: Mode = "on"
    disable: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    plugins: tuple[str, ...] | Literal["auto", "none"] = "auto"
    lock: str | None = None
    on_recompile_limit: OnLimit = "warn"
    origin: Mapping[str, str] = field(default_factory=dict)

    def where(self, name: str) -> str:
        return self.origin.get(name, "default")

    def lines(self) -> list[str]:
        """One "name = value (layer)" for each setting."""
        shown = {
            "mode": self.mode,
            "disable": ", ".join(self.disable) or "none",
            "only": "all" if self.only is None else ", ".join(self.only),
            "plugins": self.plugins if isinstance(self.plugins, str) else ", ".join(self.plugins),
            "lock": self.lock or "none",
            "on_recompile_limit": self.on_recompile_limit,
        }
        return [f"{name} = {value} ({self.where(name)})" for name, value in shown.items()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "disable": list(self.disable),
            "only": None if self.only is None else list(self.only),
            "plugins": self.plugins if isinstance(self.plugins, str) else list(self.plugins),
            "lock": self.lock,
            "on_recompile_limit": self.on_recompile_limit,
            "origin": dict(self.origin),
        }


def load(environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Settings:
    """The settings of the file, the environment and the arguments of `apply`.

    Raises `ConfigError` for an unknown name or a value that means nothing, but not under
    TORCHCOMPAT=off: that switch is there to run without us.
    """
    environ = os.environ if environ is None else environ
    try:
        try:
            settings = _from_file(Settings(), folder or Path.cwd())
        except OSError:  # no current directory, or a file that may not be read
            settings = Settings()
        settings = _from_env(settings, environ)
        for name, value in _arguments.items():
            settings = _with(settings, name, value, f"{name}=")
        return settings
    except ConfigError:
        if _is_off(environ):
            return Settings(mode="off", origin={"mode": "TORCHCOMPAT"})
        raise


def _is_off(environ: Mapping[str, str]) -> bool:
    return _MODES.get(environ.get("TORCHCOMPAT", "").strip().lower()) == "off"


# What apply() was told, which holds until it is told otherwise or everything is unapplied.
_arguments: dict[str, object] = {}
_in_force: Settings = Settings()


def arguments() -> dict[str, object]:
    """The settings that `apply` was given; a copy."""
    return dict(_arguments)


def set_arguments(given: Mapping[str, object]) -> None:
    """Replace the settings that `apply` was given. Raises `ConfigError`, and changes nothing then;
    under TORCHCOMPAT=off it does neither."""
    if _is_off(os.environ):
        return
    for name, value in given.items():
        _READ[name](value, f"{name}=")
    _arguments.clear()
    _arguments.update(given)


def take_effect(settings: Settings) -> None:
    """From now on `settings` is what patches go by."""
    global _in_force
    _in_force = settings


def in_force() -> Settings:
    """What patches go by: the settings of the last `apply`. Reads no file, and raises nothing."""
    return _in_force


def _with(settings: Settings, name: str, value: Any, layer: str) -> Settings:
    change: dict[str, Any] = {name: _READ[name](value, layer)}
    return replace(settings, **change, origin={**settings.origin, name: layer})


def _from_env(settings: Settings, environ: Mapping[str, str]) -> Settings:
    known = {name.removeprefix(_PREFIX): name for name in (*ENVIRONMENT, *_OTHERS)}
    for variable in environ:
        tail = variable.removeprefix(_PREFIX)
        if tail != variable and tail not in known:  # by the tails: the prefix is alike in all
            hint = nearest(tail, known, shown=known)
            raise ConfigError(f"unknown environment variable {variable}: {hint}")
    for variable, name in ENVIRONMENT.items():
        if environ.get(variable, "").strip():
            settings = _with(settings, name, environ[variable], variable)
    return settings


# [tool.torchcompat], [tool] with torchcompat.mode, tool = {torchcompat = …}: whatever TOML allows.
# A project that only names us elsewhere need not pay for a TOML parser.
_MAY_HAVE_TABLE: Final = re.compile(
    rb"""(?:tool["']?\s*\.\s*|^\s*|[{,]\s*)["']?torchcompat["']?\s*(?:[].=]|$)""", re.MULTILINE
)


def _from_file(settings: Settings, folder: Path) -> Settings:
    path = next(
        (p for d in (folder, *folder.parents) if (p := d / "pyproject.toml").is_file()), None
    )
    content = path.read_bytes() if path is not None else b""
    if not _MAY_HAVE_TABLE.search(content):
        return settings
    if sys.version_info >= (3, 11):  # here for the sake of a quick start
        import tomllib
    else:
        import tomli as tomllib
    try:
        tool = tomllib.loads(content.decode()).get("tool", {})
    except ValueError as e:  # no UTF-8, or no TOML
        raise ConfigError(f"{path} is no TOML: {e}") from e
    table = tool.get("torchcompat", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.torchcompat is {table!r}; it must be a table")
    for name, value in table.items():
        layer = f"{path} [tool.torchcompat] {name}"
        if name not in _READ:
            raise ConfigError(f"{layer}: unknown key, {nearest(name, _READ)}")
        if name == "lock" and isinstance(value, str) and path is not None:
            value = str(path.parent / value)
        settings = _with(settings, name, value, layer)
    return settings


def _read_mode(value: object, layer: str) -> Mode:
    mode = _MODES.get(value.strip().lower()) if isinstance(value, str) else None
    if mode is None:
        raise ConfigError(f"{layer} is {value!r}; it can be on, off or strict")
    return mode


def _read_names(value: object, layer: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
        raise ConfigError(f"{layer} is {value!r}; it must be a list of names")
    return tuple(dict.fromkeys(p.strip() for p in parts if p.strip()))


def _read_plugins(value: object, layer: str) -> tuple[str, ...] | Literal["auto", "none"]:
    names = _read_names(value, layer)
    if names == ("auto",):
        return "auto"
    return "none" if names in ((), ("none",)) else names


def _read_lock(value: object, layer: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{layer} is {value!r}; it must be the path of a lock file")
    return value


def _read_on_limit(value: object, layer: str) -> OnLimit:
    choice = _ON_LIMIT.get(value.strip().lower()) if isinstance(value, str) else None
    if choice is None:
        raise ConfigError(f"{layer} is {value!r}; it can be warn or error")
    return choice


_READ: Final[dict[str, Callable[[object, str], Any]]] = {
    "mode": _read_mode,
    "disable": _read_names,
    "only": _read_names,
    "plugins": _read_plugins,
    "lock": _read_lock,
    "on_recompile_limit": _read_on_limit,
}
