"""Decoding with a drafter against decoding without one, in the same process and on the same text.

    python benchmarks/decode_speed.py [--drafter RUN_OR_CHECKPOINT] [--target NAME]
                                      [--prompts 6] [--tokens 48] [--batch 1,4] [--repeat 2]
                                      [--device cuda:0 --dtype bfloat16 --compile]

Without --drafter the quick start is trained first (about ten minutes on two CPU cores). Decoded are
HumanEval's last problems, greedily. The ways are, turn by turn so that all of them see the same
machine: plain (`generate` without a drafter), the drafter with its full block, the drafter with
adaptive blocks, and an untrained drafter of the same shape with full and with adaptive blocks: what
a drafter costs that is never right. Seconds are the best of the repetitions. Exits with 1 if an
output differs from plain's in float32, or if the drafter is not faster than plain at batch 1.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dflash import generate
from dflash.checkpoint_format import load_drafter
from dflash.drafter import Drafter
from dflash.evaluate import decoding_threads
from dflash.target import load_target
from dflash.tasks import load_task


def trained(directory: Path) -> Path:
    """A quick-start run of its own."""
    command = [sys.executable, "-m", "dflash", "train", "--run", str(directory / "run")]
    subprocess.run(command, check=True)
    return directory / "run"


def timed(ways, target, prompts, options, repeat, batch):
    """{way: (seconds, completions)}; the ways take turns."""
    best = {}
    for _ in range(repeat):
        for way, (drafter, adaptive) in ways.items():
            started = time.perf_counter()
            found = generate(
                target, drafter, prompts, adaptive=adaptive, batch_size=batch, **options
            )
            seconds = time.perf_counter() - started
            if way not in best or seconds < best[way][0]:
                best[way] = (seconds, found)
    return best


def untrained(drafter: Drafter) -> Drafter:
    other = Drafter(drafter.config).to(drafter.norm.weight.device, drafter.norm.weight.dtype)
    other.reset_parameters(torch.Generator().manual_seed(0))
    return other.requires_grad_(False)


def pooled(completions) -> float:
    lengths = [length for c in completions for length in c.accept_lengths]
    return sum(lengths) / len(lengths) if lengths else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.drafter or trained(Path(scratch))
        target = load_target(options.target, options.dtype, options.device)
        drafter, config = load_drafter(place, target=target.spec, dtype=target.dtype)
    drafter.to(target.device).requires_grad_(False)
    target = target.with_taps(config.target_layer_ids)
    samples = load_task("humaneval", None, 0)[-options.prompts :]
    prompts = [[{"role": "user", "content": sample.turns[0]}] for sample in samples]
    how = {"max_new_tokens": options.tokens, "compile": options.compile}
    if target.device.type == "cpu":
        tokens = target.tokenizer(samples[0].turns[0])["input_ids"]
        torch.set_num_threads(decoding_threads(target, tokens))
    other = untrained(drafter)
    ways = {
        "plain": (None, False),
        "drafter": (drafter, False),
        "drafter, adaptive": (drafter, True),
        "untrained": (other, False),
        "untrained, adaptive": (other, True),
    }
    print(
        f"torch {torch.__version__}, {platform.machine()}, {target.device}, {options.dtype}, "
        f"{torch.get_num_threads()} threads, blocks of {config.block_size}\n"
    )
    print("| batch | way | tokens/s | times plain | acceptance length (pooled) | equal to plain |")
    print("|---|---|---|---|---|---|")
    timed(ways, target, prompts[:1], how | {"max_new_tokens": 8}, 1, 1)  # the first calls are slow
    good = True
    for batch in (int(text) for text in options.batch.split(",")):
        best = timed(ways, target, prompts, how, options.repeat, batch)
        seconds, plain = best["plain"]
        for way, (mine, found) in best.items():
            tokens = sum(len(c.ids) for c in found)
            equal = sum(a.ids == b.ids for a, b in zip(plain, found, strict=True))
            print(
                f"| {batch} | {way} | {tokens / mine:.1f} | {seconds / mine:.2f} | "
                f"{pooled(found):.2f} | {equal} of {len(plain)} |"
            )
            good &= options.dtype != "float32" or equal == len(plain)
        good &= batch > 1 or best["drafter"][0] < seconds
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
