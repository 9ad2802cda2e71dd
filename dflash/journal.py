"""What a run keeps and says about its steps: metrics.jsonl, a line now and then, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dflash.loop import Waits
from dflash.progress import duration, say
from dflash.replica import StepResult
from dflash.run_dir import RunDir, append_line, read_lines, rewrite_lines

_NO_WAITS = Waits(0.0, 0.0, 0.0)


class Journal:
    """Hears of every step (`on_step`), in the thread of drafter-0.

    Every step is a line of metrics.jsonl; every `log_every` steps a line is printed with the means
    since the last one. `checkpoint` is called every `checkpoint_every` steps and after the last.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        steps: int,
        first: int,
        log_every: int,
        checkpoint_every: int,
        checkpoint: Callable[[], None],
        write: Callable[[str], None] = say,
    ) -> None:
        self._run = run
        self._steps = steps
        self._step = first
        self._log_every = log_every
        self._checkpoint_every = checkpoint_every
        self._checkpoint = checkpoint
        self._write = write
        self._window: list[StepResult] = []
        self._waits = self._line_waits = _NO_WAITS
        self._started = self._line_time = self._step_time = time.perf_counter()
        self._first = first
        # What an interrupted run logged behind its last checkpoint happens again.
        kept = [record for record in read_lines(run.metrics) if record["step"] <= first]
        rewrite_lines(run.metrics, kept)

    def begin(self) -> None:
        """The first step starts now: what went before is not its time."""
        self._started = self._line_time = self._step_time = time.perf_counter()

    def on_step(self, lr: float, result: StepResult, waits: Waits) -> None:
        self._step += 1
        now = time.perf_counter()
        self._keep(lr, result, waits, now)
        self._window.append(result)
        if self._step % self._log_every == 0 or self._step == self._steps:
            self._write(self._line(lr, waits, now))
            self._window = []
            self._line_waits, self._line_time = waits, now
        if self._step % self._checkpoint_every == 0 or self._step == self._steps:
            self._checkpoint()
            now = time.perf_counter()  # writing it is not the next step's time
        self._step_time = now

    def _keep(self, lr: float, result: StepResult, waits: Waits, now: float) -> None:
        seconds = now - self._step_time
        record = {
            "step": self._step,
            "loss": result.loss,
            "ce": result.ce,
            "kl": result.kl,
            "accuracy": [None if math.isnan(share) else share for share in result.accuracy],
            "acceptance": None if math.isnan(result.acceptance) else result.acceptance,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "blocks": result.blocks,
            "tokens": result.tokens,
            "dropped": result.dropped,
            "seconds": round(seconds, 4),
            "wait_targets": round(waits.targets - self._waits.targets, 4),
            "wait_drafters": round(waits.drafters - self._waits.drafters, 4),
            "wait_exchange": round(waits.exchange - self._waits.exchange, 4),
        }
        append_line(self._run.metrics, record)
        self._waits = waits

    def _line(self, lr: float, waits: Waits, now: float) -> str:
        window, before = self._window, self._line_waits
        count = len(window)
        slots = " ".join(
            f"{100 * _mean([r.accuracy[k] for r in window]):.0f}"
            for k in range(min(4, len(window[0].accuracy)))
        )
        seconds = now - self._line_time
        left = (now - self._started) / (self._step - self._first) * (self._steps - self._step)
        dropped = sum(r.dropped for r in window)
        return (
            f"step {self._step:>{len(str(self._steps))}}/{self._steps}"
            f"  loss {_mean([r.loss for r in window]):.4f}"
            f"  right {slots} %"
            f"  accept {_mean([r.acceptance for r in window]):.3f}"
            f"  lr {lr:.2e}"
            f"  waited: targets {waits.targets - before.targets:.1f} s"
            f" drafters {waits.drafters - before.drafters:.1f} s"
            f" exchange {waits.exchange - before.exchange:.1f} s"
            f"  {sum(r.tokens for r in window) / seconds:.0f} tokens/s"
            f"  {seconds / count:.2f} s/step"
            f"  {duration(left)} left" + (f"  {dropped} not finite" if dropped else "")
        )


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
