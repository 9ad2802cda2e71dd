"""What each setting of the quick start is worth: acceptance length of one change at a time.

    python benchmarks/quickstart_recipe.py --out DIR [--at-once 1] [--only base,random]
                                           [section.key=value …]

Every variant is one `dflash train` with the quick start's settings, one of them changed, in a
process of its own; all train on the same answers and decode the same held-out prompts. Prints a
Markdown table, with versions, device and command above it, and writes it to OUT/table.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "base": ("the quick start", []),
    "random": ("drafter starts from noise", ["drafter.init=random"]),
    "ce": ("cross-entropy only", ["loss.ce=1", "loss.kl=0"]),
    "mix": ("half cross-entropy", ["loss.ce=0.5"]),
    "layers1": ("one layer", ["drafter.layers=1"]),
    "layers3": ("three layers", ["drafter.layers=3"]),
    "block3": ("blocks of 3", ["drafter.block_size=3"]),
    "block8": ("blocks of 8", ["drafter.block_size=8"]),
    "taps3": ("three taps", ["drafter.taps=3"]),
    "full": ("loss over the whole vocabulary", ["loss.head_vocab=full"]),
    "lr_half": ("half the learning rate", ["optim.lr=5e-4"]),
    "lr_twice": ("twice the learning rate", ["optim.lr=2e-3"]),
    "anchors64": ("64 anchors a sequence", ["train.anchors=64"]),
    "steps150": ("150 steps", ["train.steps=150"]),
    "steps600": ("600 steps", ["train.steps=600"]),
    "solutions": ("trained on the published solutions", ["data.responses=never"]),
}


def run(name: str, out: Path, changes: list[str], answers: Path | None) -> float:
    """Train one variant; its wall seconds. The answers of another run save writing them again."""
    directory = out / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    if answers is not None:
        shutil.copy(answers, directory / "responses.jsonl")
    command = [sys.executable, "-m", "dflash", "train", "--run", str(directory)]
    started = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        subprocess.run([*command, *changes, *VARIANTS[name][1]], stdout=log, stderr=log, check=True)
    return time.perf_counter() - started


def row(name: str, out: Path) -> str:
    found = json.loads((out / name / "evaluation.json").read_text())
    slots = " ".join(f"{100 * share:.0f}" for share in found["per_position"])
    equal = f"{found['outputs_equal_to_greedy']}/{found['prompts']}"
    title, changes = VARIANTS[name]
    return (
        f"| {title} | {' '.join(f'`{c}`' for c in changes)} "
        f"| {found['acceptance_length_macro']:.3f} | {found['acceptance_length_pooled']:.3f} "
        f"| {slots} | {equal} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=1, help="variants that run side by side")
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("settings", nargs="*", help="further settings for every variant")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name != "base"]
    run("base", options.out, options.settings, None)
    answers = options.out / "base" / "responses.jsonl"
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        jobs = {n: pool.submit(run, n, options.out, options.settings, answers) for n in names}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    lines = [
        f"torch {torch.__version__}, {device}, `{' '.join(sys.argv)}`",
        "",
        "| variant | changed | acceptance length (mean of responses) | pooled | slots, % | equal |",
        "|---|---|---|---|---|---|",
        row("base", options.out),
    ]
    for name in names:
        error = jobs[name].exception()
        lines.append(
            f"| {VARIANTS[name][0]} | failed: {error} |" if error else row(name, options.out)
        )
    text = "\n".join(lines)
    (options.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
