"""Rounds of threads, a watchdog, and what a failure needs to be run again."""

from __future__ import annotations

import argparse
import collections
import faulthandler
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from operations import KINDS, SETTINGS, Actor, Operation, plan
from programs import Perceptron, World

HERE = Path(__file__).parent
FAILED, USAGE, HUNG = 1, 2, 3
#: How often one list of operations is tried before it counts as harmless, when a failure is shrunk.
TRIES = 4


@dataclass
class Failure:
    thread: str
    index: int
    operation: Operation
    error: BaseException


@dataclass
class Round:
    """Threads that start together; the first failure ends the round."""

    lists: list[list[Operation]]
    backends: tuple[str, ...]
    hang_s: float
    failures: list[Failure] = field(default_factory=list)
    under_way: dict[str, tuple[Operation, float]] = field(default_factory=dict)
    done: collections.Counter[str] = field(default_factory=collections.Counter)

    def run(self) -> bool:
        """Whether all operations went well. Does not return from a hang."""
        world = World()
        start = threading.Barrier(len(self.lists))
        threads = []
        for number, operations in enumerate(self.lists):
            model = Perceptron()
            actor = Actor(f"stress-{number}", world, self.backends, model, deepcopy(model))
            work = (actor, operations, start)
            threads.append(
                threading.Thread(target=self._work, args=work, name=actor.name, daemon=True)
            )
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.2)
            self._watch()
        return not self.failures

    def _work(self, actor: Actor, operations: list[Operation], start: threading.Barrier) -> None:
        start.wait(self.hang_s)
        for index, operation in enumerate(operations):
            if self.failures:
                break
            self.under_way[actor.name] = operation, time.monotonic()
            try:
                KINDS[operation.kind].run(actor, operation.settings)
            except BaseException as e:
                self.failures.append(Failure(actor.name, index, operation, e))
            self.done[operation.kind] += 1
        self.under_way.pop(actor.name, None)

    def _watch(self) -> None:
        # Should nothing of Python run any more, the dump comes from a thread without it.
        faulthandler.dump_traceback_later(2 * self.hang_s, exit=True)
        now = time.monotonic()
        under_way = dict(self.under_way)
        if all(now - since < self.hang_s for _, since in under_way.values()):
            return
        print(f"hung: an operation takes longer than {self.hang_s:.0f} s", file=sys.stderr)
        for name, (operation, since) in under_way.items():
            print(f"  {name}, for {now - since:.0f} s: {operation}", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(HUNG)


def main(argv: list[str]) -> int:
    """0: no failure. 1: one, told with the line that runs it again. 2: usage. 3: hung."""
    options = _options(argv)
    faulthandler.enable()
    sys.setswitchinterval(options.switch_interval)
    warnings.simplefilter("ignore")
    if not options.stock:
        import torchcompat

        report = torchcompat.apply()
        if not any(verdict.state is torchcompat.State.APPLIED for verdict in report):
            print(
                f"no patch is applied, so --stock is what this would be\n{report}", file=sys.stderr
            )
            return USAGE
    # CUDA builds up to 2.11 crash on a machine without a GPU unless the main thread compiles first.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    return _rounds(options)


def _rounds(options: argparse.Namespace) -> int:
    begun, done = time.monotonic(), collections.Counter[str]()
    turn = begin = options.replay if options.replay is not None else 0
    while time.monotonic() - begun < options.minutes * 60 and turn - begin < options.rounds:
        number = options.replay if options.replay is not None else turn
        lists = [
            [o for o in plan(options.seed, number, i, options.operations) if o.kind in options.only]
            for i in range(options.threads)
        ]
        if options.verbose:
            print(f"round {number}", flush=True)
        current = Round(lists, options.backends, options.hang)
        kept = {name: getattr(torch._dynamo.config, name) for name in SETTINGS}
        went_well = current.run()
        done += current.done
        if not went_well:
            seconds = time.monotonic() - begun
            print(f"failed after {seconds:.1f} s and {done.total()} operations", file=sys.stderr)
            return _tell(options, number, current)
        for name, value in kept.items():
            setattr(torch._dynamo.config, name, value)
        torch._dynamo.reset()
        turn += 1
    faulthandler.cancel_dump_traceback_later()
    print(
        f"torch {torch.__version__}, seed {options.seed}: {turn - begin} rounds of "
        f"{options.threads} threads, {done.total()} operations in "
        f"{time.monotonic() - begun:.0f} s, no failure"
    )
    print("  " + ", ".join(f"{name} {count}" for name, count in done.most_common()))
    return 0


def _tell(options: argparse.Namespace, turn: int, failed: Round) -> int:
    first = failed.failures[0]
    traceback.print_exception(first.error)
    faulthandler.cancel_dump_traceback_later()
    print(
        f"\n{first.thread} failed at operation {first.index}: {first.operation}\n"
        f"{type(first.error).__name__}: {first.error}",
        file=sys.stderr,
    )
    for later in failed.failures[1:]:
        print(f"after it {later.thread}: {type(later.error).__name__}", file=sys.stderr)
    for name, (operation, _) in failed.under_way.items():
        print(f"meanwhile {name}: {operation}", file=sys.stderr)
    only = list(options.only)
    if options.shrink:
        only = _shrink(
            options, turn, [k for k in only if any(o.kind == k for x in failed.lists for o in x)]
        )
    print("again: " + " ".join(["python", *_command(options, turn, only)]), file=sys.stderr)
    return FAILED


def _command(options: argparse.Namespace, turn: int, only: list[str]) -> list[str]:
    words = [os.path.relpath(HERE), f"--seed={options.seed}", f"--threads={options.threads}"]
    words += [f"--operations={options.operations}", f"--backends={','.join(options.backends)}"]
    words += [f"--replay={turn}", f"--rounds={TRIES}", f"--only={','.join(only)}"]
    return [*words, *(["--stock"] if options.stock else [])]


def _shrink(options: argparse.Namespace, turn: int, only: list[str]) -> list[str]:
    """The kinds without which the round does not fail any more, in a few tries each."""
    for kind in list(only):
        fewer = [k for k in only if k != kind]
        command = [sys.executable, *_command(options, turn, fewer), f"--hang={options.hang}"]
        if fewer and subprocess.run(command, capture_output=True, check=False).returncode:
            only = fewer
            print(f"fails without {kind}", file=sys.stderr, flush=True)
    return only


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(
            f"no operation {unknown[0]!r}; there are {', '.join(KINDS)}"
        )
    return names


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/stress", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=1.0, help="no round begins later (default 1)")
    add("--rounds", type=int, default=sys.maxsize, help="at most so many (default: no limit)")
    add("--threads", type=int, default=4)
    add("--operations", type=int, default=30, help="of each thread in a round (default 30)")
    add("--only", type=_kinds, default=tuple(KINDS), help="kinds of operations, with commas")
    add("--backends", type=lambda text: tuple(text.split(",")), default=("eager", "aot_eager"))
    add("--replay", type=int, metavar="ROUND", help="this round, again and again")
    add("--shrink", action="store_true", help="after a failure: which kinds it takes")
    add("--stock", action="store_true", help="without the patches")
    add(
        "--hang", type=float, default=120.0, help="seconds that an operation may take (default 120)"
    )
    add("--switch-interval", type=float, default=5e-4, help="of Python's threads, in seconds")
    add("--verbose", action="store_true", help="say which round begins")
    return parser.parse_args(argv)
