"""`dflash export` and `dflash inspect`: their command lines and what they print."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import CheckpointError, ConfigError, TargetError

if TYPE_CHECKING:
    from dflash.export import Exported
    from dflash.target import Target

__all__ = ["add_export", "add_inspect", "target_of_run"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def add_export(commands: Any) -> None:
    """The command `export`."""
    parser = commands.add_parser(
        "export",
        help="write a trained drafter in the layout that a server reads",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Write a drafter as a directory that a server loads.

              dflash export runs/20261201-120000-smollm2 my-drafter
              dflash export RUN my-drafter --format speculators
              dflash export RUN my-drafter --format sglang --dtype float16
              dflash export z-lab-drafter my-drafter --format speculators --target DIR

            The source is a run (its newest checkpoint), one checkpoint, or a drafter in any layout
            that dflash knows: its own, z-lab's, speculators', TorchSpec's. Formats:

              zlab         for z-lab's code and vLLM: the drafter's own tensors only
              sglang       the same without auto_map, which SGLang does not want
              speculators  for speculators and vLLM: with the target's embedding and head

            The directory appears when it is complete; until then nothing is there."""
        ),
    )
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="what to export")
    add("out", type=Path, metavar="OUT", help="the new directory")
    add("--format", choices=["zlab", "speculators", "sglang"], default="zlab", help="default: zlab")
    add(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of the weights; float32 takes a run's master weights (default: bfloat16)",
    )
    add(
        "--target",
        metavar="NAME",
        help="the target the drafter is for, as in `dflash train`; a run knows its own. Needed for "
        "the speculators format, and where a published drafter does not say its target's depth",
    )
    add(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="weights above this are split into several files: 500MB, 2GiB (default: 5GB)",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace the directory OUT, which must be a drafter's",
    )
    add("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(function=_export)


def add_inspect(commands: Any) -> None:
    """The command `inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="say what a drafter on disk is, and find what would make it draft wrongly",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Print what a drafter is (format, block size, layers, taps, mask token, rope, types,
            size) and look for mistakes that raise no error and only cost acceptance.

              dflash inspect my-drafter
              dflash inspect my-drafter --target DIR      compare it with its target as well
              dflash inspect RUN --target smollm2 --probe 0 --json

            Without a target: renamed, missing or mis-shaped tensors, NaN, infinity, all-zero
            tensors, layer ids off by one, a mask token outside the vocabulary, the two spellings of
            rope disagreeing, relatives of DFlash with shifted labels. With one also: other sizes,
            another rope, an embedding or head that is not the target's, a mask token that text
            contains; and the target writes a few answers to see whether the drafter predicts
            them as it is, or better with labels or taps moved by one."""
        ),
        epilog="Exit status: 0 nothing found, 1 findings, 2 a wrong command line.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a drafter's directory, or a run's")
    add("--target", metavar="NAME", help="the target it is for, as in `dflash train`")
    add(
        "--probe",
        type=int,
        metavar="TOKENS",
        default=64,
        help="tokens of each of three answers that the target writes; 0 = none (default: 64)",
    )
    add("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(function=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from dflash.inspection import inspect_checkpoint
    from dflash.progress import say, table

    if options.probe < 0:
        raise ConfigError(f"--probe is {options.probe}; it is a number of tokens, or 0 for none")
    place = _checkpoint(options.checkpoint)
    target = None if options.target is None else _target(options.target, "float32")
    found = inspect_checkpoint(place, target, probe_tokens=options.probe)
    if options.json:
        say(json.dumps(found.to_dict(), indent=2))
        return 1 if found.findings else 0
    say(table(str(found.path), found.rows()))
    for note in found.notes:
        say(f"note: {note.kind}: {note.text}")
    for finding in found.findings:
        say(f"finding: {finding.kind}: {finding.text}")
    if not found.findings:
        against = f"beside {found.target}" if found.target else "(no --target to compare with)"
        say(f"nothing found {against}")
    return 1 if found.findings else 0


def _export(options: argparse.Namespace) -> int:
    import torch

    from dflash.checkpoint_format import read_checkpoint
    from dflash.export import Verifier, check_out, export_drafter, with_masters
    from dflash.progress import say

    max_bytes = _bytes(options.max_shard_size)
    place = _checkpoint(options.source)
    check_out(options.out, place, overwrite=options.overwrite)
    name = options.target
    if name is None and options.format == "speculators":
        name = target_of_run(place)
    target = None if name is None else _target(name, options.dtype)
    source = read_checkpoint(place, target=target.spec if target else None, frozen=target)
    verifier = None if target is None else Verifier.of(target)
    if options.format == "speculators" and verifier is None:
        verifier = Verifier.stored_in(source)
    if options.dtype == "float32":
        source = with_masters(source)
    written = export_drafter(
        source,
        options.out,
        options.format,
        verifier=verifier,
        dtype=getattr(torch, options.dtype),
        max_bytes=max_bytes,
        overwrite=options.overwrite,
    )
    if options.json:
        say(json.dumps(written.to_dict(), indent=2))
    else:
        say(_summary(written, source.config.block_size))
    return 0


def _summary(written: Exported, block_size: int) -> str:
    if written.layout == "sglang":
        use = (
            "SGLang: --speculative-algorithm DFLASH --speculative-num-draft-tokens "
            f"{block_size}, with this directory as the draft model"
        )
    else:
        options = {"method": "dflash", "model": str(written.path)}
        shown = json.dumps({**options, "num_speculative_tokens": block_size - 1})
        use = f"vLLM: --speculative-config '{shown}'"
    return (
        f"{written.path}: {written.layout}, {written.dtype}, {written.parameters:,} parameters, "
        f"{written.size / 1e6:,.1f} MB in {', '.join(written.files)}\n{use}"
    )


def _checkpoint(path: Path) -> Path:
    """Raise ConfigError if there is none: a wrong command line, not a damaged drafter."""
    from dflash.checkpoint_format import find_checkpoint

    try:
        return find_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _target(name: str, dtype: str) -> Target:
    from dflash.target import load_target

    try:
        return load_target(name, dtype, say=lambda text: print(text, file=sys.stderr))
    except TargetError as error:  # exit 2: exit 1 would say that the drafter is bad
        raise ConfigError(f"--target: {error}") from error


def target_of_run(checkpoint: Path) -> str | None:
    """The target in the settings of the run that a checkpoint lies in."""
    settings = checkpoint.parent.parent / "config.json"
    if checkpoint.parent.name != "checkpoints" or not settings.is_file():
        return None
    from dflash.run_dir import read_json

    content = read_json(settings)
    name = content.get("target", {}).get("name") if isinstance(content, dict) else None
    return str(name) if name else None


def _bytes(text: str) -> int:
    """`5GB`, `500MB`, `2GiB`, `1000` as a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", text.strip().upper())
    size = int(float(match.group(1)) * _UNITS.get(match.group(2), 0)) if match else 0
    if size < 1:
        raise ConfigError(f"--max-shard-size is {text!r}; it is a size like 500MB, 5GB or 2GiB")
    return size
