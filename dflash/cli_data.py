"""`dflash data`: its command line and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.config import Config
from dflash.errors import ConfigError, TargetError

if TYPE_CHECKING:
    from dflash.survey import Survey
    from dflash.target import TargetText

__all__ = ["add_data", "show_data"]


def add_data(commands: Any) -> Any:
    """The command `data`; returns its parser."""
    parser = commands.add_parser(
        "data",
        help="say what training would see of its data, and find what looks wrong",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Read the data as `dflash train` would with the same settings, without the target's
            weights, and print counts, lengths, what is skipped and why, and warnings.

              dflash data --target DIR --data chats.jsonl --show 3
              dflash data --target DIR --data chats.jsonl data.max_length=4096 --json

            --show prints sequences token by token. On a terminal the tokens of the loss are
            green; elsewhere they are the lines that begin with +."""
        ),
        epilog="Exit status: 0 nothing found, 1 warnings or rows that training refuses, 2 a wrong "
        "command line.",
    )
    add = parser.add_argument
    add("settings", nargs="*", metavar="section.key=value", help="any setting of `dflash train`")
    add("--target", metavar="NAME", help="the target, as in `dflash train`")
    add("--data", metavar="SOURCE", help="the data, as in `dflash train`")
    add("--config", type=Path, metavar="FILE", help="settings in JSON, TOML or YAML")
    add("--preset", metavar="NAME", help="as in `dflash train` (default: quickstart)")
    add("--seed", metavar="N", help="as in `dflash train`")
    add("--show", type=int, default=0, metavar="N", help="print the first N sequences")
    add("--color", choices=["auto", "always", "never"], default="auto", help="default: auto")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def show_data(options: argparse.Namespace, config: Config) -> int:
    """Run the command; 1 if there is something to warn of. Raises ConfigError or DataError."""
    from dflash.data import Rejects
    from dflash.progress import say
    from dflash.survey import survey
    from dflash.target import load_target_text
    from dflash.train import read_conversations

    if options.show < 0:
        raise ConfigError(f"--show is {options.show}; it is a number of sequences")
    try:
        text = load_target_text(config.target.name, say=lambda line: print(line, file=sys.stderr))
    except TargetError as error:  # exit 2: exit 1 would say that the data is bad
        raise ConfigError(f"--target: {error}") from error
    rejects = Rejects("skip")
    conversations = read_conversations(config, rejects)
    found = survey(conversations, text, config.data, bad=rejects.problems, show=options.show)
    warned = any(remark.serious for remark in found.remarks)
    refused = bool(found.problems) and config.data.on_bad == "error"
    if options.json:
        say(json.dumps({**found.to_dict(), "shown": _as_tokens(found, text)}, indent=2))
    else:
        _print(found, text, config, colour=_colour(options.color))
    return 1 if warned or refused or not found.kept else 0


def _print(found: Survey, text: TargetText, config: Config, *, colour: bool) -> None:
    from dflash.progress import say, table
    from dflash.token_view import coloured, marked

    show = coloured if colour else marked
    for example in found.shown:
        learned = sum(example.loss_mask)
        say(f"{example.origin}: {len(example.ids)} tokens, {learned} of them in the loss")
        say(show(text.tokenizer, example))
        say("")
    say(table(f"{config.data.source} as {text.name} reads it", _rows(found)))
    if found.lengths:
        say(table("tokens of a sequence", _bars(found)))
    for problem in found.problems[:3]:
        say(f"skipped: {problem}")
    if found.problems and config.data.on_bad == "error":
        say(f"training would stop at the first of these {len(found.problems)} rows (data.on_bad)")
    for remark in found.remarks:
        say(f"{'warning' if remark.serious else 'note'}: {remark.kind}: {remark.text}")


def _rows(found: Survey) -> list[tuple[str, str]]:
    share = 100 * found.learned / found.tokens if found.tokens else 0.0
    rows = [("rows", str(found.rows)), ("kept", str(found.kept))]
    rows += [(f"skipped: {kind}", str(count)) for kind, count in found.skipped.most_common()]
    if found.waiting:
        rows.append(("answers to write", str(found.waiting)))
    rows += [
        ("tokens", str(found.tokens)),
        ("in the loss", f"{found.learned}  {share:.1f} %"),
        ("cut rows", f"{found.cut}  ({found.cut_tokens} tokens lost)" if found.cut else "0"),
    ]
    return rows


def _bars(found: Survey) -> list[tuple[str, str]]:
    most = max(count for _, count in found.histogram())
    return [
        (f"up to {top}", f"{'#' * round(40 * count / most)} {count}".strip())
        for top, count in found.histogram()
    ]


def _as_tokens(found: Survey, text: TargetText) -> list[dict[str, Any]]:
    from dflash.token_view import token_texts

    shown = []
    for example in found.shown:
        texts = token_texts(text.tokenizer, example.ids)
        tokens = zip(example.ids, texts, example.loss_mask, strict=True)
        listed = [{"id": i, "text": words, "learned": learned} for i, words, learned in tokens]
        shown.append({"origin": example.origin, "tokens": listed})
    return shown


def _colour(wish: str) -> bool:
    """`auto`: on a terminal, unless NO_COLOR is set (no-color.org)."""
    if wish != "auto":
        return wish == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
