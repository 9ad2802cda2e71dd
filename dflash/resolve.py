"""How a configuration is put together.

Layers, later wins: defaults < a preset < a file (JSON, TOML, YAML) < `section.key=value`. Every run
writes the resolved result as `config.json`, which is accepted back as a file.
"""

from __future__ import annotations

import difflib
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from dflash.config import PRESETS, RESUMABLE, Config, settings
from dflash.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def resolve(
    *,
    preset: str = "quickstart",
    file: Path | None = None,
    overrides: Mapping[str, Any] = types.MappingProxyType({}),
) -> Config:
    """Defaults < preset < file < overrides (`section.key` -> value or its text).

    A file may name its preset by a top-level `preset`; the argument is used otherwise.
    Raises ConfigError that names the setting, the value and what is allowed.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if file is not None:
        content = read_file(file)
        preset = str(content.pop("preset", preset))
        layers.append((str(file), _flatten(content, str(file))))
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}: known are {', '.join(sorted(PRESETS))}")
    layers.insert(0, (f"preset {preset}", PRESETS[preset]))
    layers.append(("command line", overrides))

    values = _defaults()
    for origin, layer in layers:
        values.update(_checked(layer, origin))
    return _validated(_build(values))


def resume(run_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """The configuration of an interrupted run with the changes that cannot alter its losses.

    Raises ConfigError for any other change.
    """
    origin = "the run's config.json"
    values = _defaults() | _checked(_flatten(run_config, origin), origin)
    for name, new in _checked(overrides, "command line").items():
        if new != values[name] and name not in RESUMABLE:
            raise ConfigError(
                f"{name} cannot change in a resumed run: it has {values[name]!r}, not {new!r}; "
                f"start a new run with drafter.init=<checkpoint> instead "
                f"(may change: {', '.join(sorted(RESUMABLE))})"
            )
        values[name] = new
    return _validated(_build(values))


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with some settings (`section.key`) changed. Raises ConfigError."""
    current = _flatten(config.to_dict(), "the configuration")
    return _validated(_build(_checked(current | dict(changes), "the program")))


def read_file(path: Path) -> dict[str, Any]:
    """The nested mapping in a JSON, TOML or YAML file; ConfigError if it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        content = _parse(path, text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not {type(content).__name__}")
    return content


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """`["optim.lr=1e-3"]` -> `{"optim.lr": "1e-3"}`; ConfigError for anything else."""
    result: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigError(f"{text!r} is not section.key=value, for example optim.lr=1e-3")
        result[name.strip()] = value.strip()
    return result


def unknown_name(name: str, known: Mapping[str, object] | Sequence[str], kind: str) -> str:
    """The sentence for a name nobody knows, with the nearest one that is known."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if not near:  # the key may be right and the section missing or wrong
        tail = name.rsplit(".", 1)[-1]
        near = [other for other in known if other.rsplit(".", 1)[-1] == tail][:1]
    hint = f": did you mean {near[0]}?" if near else "; `dflash train --help` lists all"
    return f"unknown {kind}: {name}{hint}"


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path} needs pyyaml: install it, or use JSON or TOML") from error
        try:
            return yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(str(error).replace("\n", " ")) from error
    raise ConfigError(f"{path}: a configuration ends in .json, .toml, .yaml or .yml")


def _flatten(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    sections = [section.name for section in fields(Config)]
    for section, part in content.items():
        if section not in sections:
            raise ConfigError(unknown_name(section, sections, f"section in {origin}"))
        if not isinstance(part, Mapping):
            raise ConfigError(f"section {section} in {origin} must hold settings, not {part!r}")
        flat.update({f"{section}.{key}": value for key, value in part.items()})
    return flat


def _defaults() -> dict[str, Any]:
    return {name: default for name, (_, default, _) in settings().items()}


def _checked(layer: Mapping[str, Any], origin: str) -> dict[str, Any]:
    known = settings()
    for name in layer:
        if name not in known:
            raise ConfigError(unknown_name(name, known, f"setting in {origin}"))
    return {name: _convert(name, value, known[name][0]) for name, value in layer.items()}


def _convert(name: str, value: Any, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")
        return value
    try:
        if isinstance(value, bool):
            raise ValueError("a truth value")
        if kind is int:
            number = float(value)
            if number != int(number):
                raise ValueError("not whole")
            return int(number)
        if kind is float:
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}") from error
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; it must be text")
    return value


def _build(values: Mapping[str, Any]) -> Config:
    sections = typing.get_type_hints(Config)
    parts = {
        section.name: sections[section.name](
            **{
                item.name: values[f"{section.name}.{item.name}"]
                for item in fields(sections[section.name])
            }
        )
        for section in fields(Config)
    }
    return Config(**parts)


# (setting, smallest value that makes sense)
_AT_LEAST: tuple[tuple[str, float], ...] = (
    ("data.limit", 0),
    ("data.held_out", 0),
    ("data.max_length", 2),
    ("data.max_new_tokens", 1),
    ("data.response_batch", 1),
    ("drafter.layers", 1),
    ("drafter.taps", 0),
    ("drafter.block_size", 2),
    ("drafter.mask_token_id", -1),
    ("loss.ce", 0),
    ("loss.kl", 0),
    ("loss.gamma", 0),
    ("loss.head_top", 0),
    ("loss.chunk", 0),
    ("optim.lr", 0),
    ("optim.weight_decay", 0),
    ("optim.clip", 0),
    ("optim.min_lr", 0),
    ("train.seed", 0),
    ("train.steps", 0),
    ("train.batch", 1),
    ("train.accumulate", 1),
    ("train.anchors", 1),
    ("train.log_every", 1),
    ("train.checkpoint_every", 1),
    ("train.keep", 1),
    ("features.cache_gb", 0),
    ("features.batch", 1),
    ("features.multiple", 1),
    ("features.buckets", 1),
    ("features.queue", 1),
    ("placement.threads", 0),
    ("eval.max_new_tokens", 1),
    ("eval.prompts", 0),
    ("eval.threads", 0),
)


def _validated(config: Config) -> Config:
    for name, least in _AT_LEAST:
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if not value >= least:  # also refuses nan
            raise ConfigError(f"{name} is {value}; it must be at least {least:g}")
    if not 0 <= config.optim.warmup <= 1:
        raise ConfigError(f"optim.warmup is {config.optim.warmup}; it is a part of the steps, 0-1")
    for name, beta in (("beta1", config.optim.beta1), ("beta2", config.optim.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(f"optim.{name} is {beta}; it must be in [0, 1)")
    if config.loss.ce == 0 and config.loss.kl == 0:
        raise ConfigError("loss.ce and loss.kl are both 0: nothing would be learned; set one")
    if not config.loss.temperature > 0:
        raise ConfigError(f"loss.temperature is {config.loss.temperature}; it must be above 0")
    if config.train.steps == 0 and not config.train.epochs > 0:
        raise ConfigError(f"train.epochs is {config.train.epochs}; it must be above 0")
    return config
