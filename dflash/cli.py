"""`python -m dflash COMMAND`: reads the command line, runs, and turns errors into exit codes.

0 the run ended well; 1 it failed (one clear error, a failed thread's traceback before it); 2 the
command line or a setting is wrong; 130 it was interrupted, 143 it was sent SIGTERM (a checkpoint is
written in both cases).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import textwrap
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dflash import __version__
from dflash.cli_data import add_data, show_data
from dflash.cli_decode import add_eval, add_generate
from dflash.cli_formats import add_export, add_inspect
from dflash.config import PRESETS, Config, settings
from dflash.errors import ConfigError, DFlashError
from dflash.resolve import parse_assignments, read_file, resolve, resume, unknown_name
from dflash.workers import any_alive

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

# Flags that are short for a setting.
_SHORTHANDS = {
    "target": "target.name",
    "data": "data.source",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "seed": "train.seed",
    "init-from": "drafter.init",
    "targets": "placement.targets",
    "drafters": "placement.drafters",
}


class _Parser(argparse.ArgumentParser):
    """argparse with our errors: ConfigError, and the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class _Terminated(KeyboardInterrupt):
    """SIGTERM: an interrupt that is not the keyboard's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Only a thread that hangs makes it exit by itself."""
    with _sigterm_interrupts():
        code = _guarded(sys.argv[1:] if arguments is None else arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if any_alive():  # deep in a computation: the interpreter's own exit would crash under it
        os._exit(code)
    return code


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Schedulers end a job by SIGTERM: it shall leave what Ctrl-C leaves."""

    def interrupt(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and it keeps its own
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _guarded(arguments: Sequence[str]) -> int:
    try:
        return _run(arguments)
    except KeyboardInterrupt as interrupt:
        terminated = isinstance(interrupt, _Terminated)
        print("terminated" if terminated else "interrupted", file=sys.stderr)
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except ConfigError as error:
        print(f"dflash: {error}", file=sys.stderr)
        return EXIT_USAGE
    except DFlashError as error:
        print(f"dflash: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(arguments: Sequence[str]) -> int:
    parser, with_settings = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    function: Callable[[argparse.Namespace], int] | None = getattr(options, "function", None)
    if function is not None:
        if unknown:
            raise ConfigError(
                f"unknown argument: {unknown[0]}; see dflash {options.command} --help"
            )
        return function(options)
    flags = [text for text in unknown if text.startswith("-")]
    if flags:
        chosen = with_settings.get(options.command, with_settings["train"])
        known = [text for action in chosen._actions for text in action.option_strings]
        raise ConfigError(unknown_name(flags[0].partition("=")[0], known, "flag"))
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    overrides: dict[str, Any] = {
        name: value
        for flag, name in _SHORTHANDS.items()
        if (value := getattr(options, flag.replace("-", "_"), None)) is not None
    }
    overrides |= parse_assignments([*options.settings, *unknown])
    if options.command == "data":
        return show_data(options, _resolved(options, overrides))
    return _train(options, overrides)


def _resolved(options: argparse.Namespace, overrides: dict[str, Any]) -> Config:
    return resolve(preset=options.preset or "quickstart", file=options.config, overrides=overrides)


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    if options.resume is not None:
        if options.config is not None or options.preset is not None or options.run is not None:
            raise ConfigError(
                "--resume takes its settings from the run: leave out --config, --preset and --run"
            )
        config = _resumed(options.resume, overrides)
    else:
        config = _resolved(options, overrides)
    if options.show_config:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    from dflash.train import train  # torch is loaded only when there is something to run

    return train(config, run_path=options.run, resume_path=options.resume)


def _resumed(run: Path, overrides: dict[str, Any]) -> Config:
    path = run / "config.json"
    if not path.exists():
        raise ConfigError(f"{run} holds no run to resume: it has no config.json")
    return resume(read_file(path), overrides)


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and those of the commands that take settings."""
    parser = _Parser(
        prog="dflash",
        description="Train DFlash block-diffusion drafters in one process, and decode with them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dflash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a drafter and decode with it; without arguments: SmolLM2 on HumanEval, CPU",
        allow_abbrev=False,  # a wrong flag must not pass for the start of another
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Train a drafter for a frozen target model, then decode held-out prompts with it.

              dflash train                                  SmolLM2-135M on HumanEval, CPU, minutes
              dflash train --data chats.jsonl               your conversations or prompts
              dflash train --targets cuda:0 --drafters cuda:1,cuda:2
              dflash train --preset paper --target DIR optim.lr=3e-4 train.epochs=2
              dflash train --resume runs/20261201-120000-smollm2
              dflash train --init-from DRAFTER --target DIR --data chats.jsonl optim.lr=6e-5

            A row (of JSONL, Parquet or a data set) is {"messages": [{"role": "user", "content":
            "..."}, ...]}, {"prompt": "..."} with or without "response", or {"text": "..."}; the
            target writes the responses that are missing. `dflash data` shows what comes of it."""
        ),
        epilog=_settings_help(),
    )
    add = train.add_argument
    add("settings", nargs="*", metavar="section.key=value", help="any setting listed below")
    add("--config", type=Path, metavar="FILE", help="settings in JSON, TOML or YAML")
    add("--preset", metavar="NAME", help=f"{' or '.join(sorted(PRESETS))} (default: quickstart)")
    add("--run", type=Path, metavar="DIR", help="the run's directory (default: runs/TIME-TARGET)")
    add("--resume", type=Path, metavar="DIR", help="go on with an interrupted run")
    known = settings()
    for flag, name in _SHORTHANDS.items():
        add(f"--{flag}", metavar=flag.upper().replace("-", "_"), help=f"{known[name][2]} ({name})")
    add("--show-config", action="store_true", help="print the resolved settings and stop")
    data = add_data(commands)
    add_generate(commands)
    add_eval(commands)
    add_export(commands)
    add_inspect(commands)
    return parser, {"train": train, "data": data}


def _settings_help() -> str:
    quickstart = PRESETS["quickstart"]
    lines = ["settings, with the quickstart's value (and the paper's, where it differs):"]
    for name, (kind, default, text) in settings().items():
        value = quickstart.get(name, default)
        shown = f"{value}" if value == default else f"{value} ({default})"
        allowed = typing.get_args(kind)
        if allowed:
            text = f"{text} [{', '.join(allowed)}]"
        lines += textwrap.wrap(
            f"{name} = {shown}: {text}", 96, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)
