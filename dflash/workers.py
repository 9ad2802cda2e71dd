"""The one place for threads: named workers, one stop signal, and waits that a stop always ends.

    StopSignal      set once; wakes every wait below
    OrderedChannel  bounded hand-over in index order, from any number of producers to one consumer
    Rendezvous      a barrier that can be used again and again
    SingleFlight    every key is made once, whoever asks first
    Turnstile       threads pass one after another, in the order of their ranks
    WorkerGroup     the threads; the first failure stops all and reaches the main thread
    share           numbered pieces of work, taken in turn by several workers

Nothing here knows what the threads compute. A wait that is cut short by the stop raises Stopped,
which ends a worker quietly: only the failure that caused the stop is reported.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from dflash.errors import WorkerFailed

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Stopped(Exception):
    """The group is stopping: leave. Not a failure."""


class StopSignal:
    """Set once, by anybody. Conditions made by `condition` are woken when it is set."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []

    def condition(self) -> threading.Condition:
        """A condition whose waiters wake up at the stop."""
        condition = threading.Condition()
        with self._lock:
            self._conditions.append(condition)
        return condition

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Stop. Never call it while holding one of the conditions: two callers would deadlock."""
        self._event.set()
        with self._lock:
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raise Stopped if set; for loops that never wait."""
        if self._event.is_set():
            raise Stopped

    def wait(self, condition: threading.Condition, ready: Callable[[], bool]) -> float:
        """Wait under the held `condition` until `ready()`; seconds waited. Stopped if set."""
        self.check()
        if ready():
            return 0.0
        started = time.perf_counter()
        condition.wait_for(lambda: self._event.is_set() or ready())
        self.check()
        return time.perf_counter() - started


class OrderedChannel(Generic[T]):
    """Items 0, 1, 2, … come out in order, whatever the order they are put in.

    `put(index)` waits until index < taken + capacity, so at most `capacity` items lie here. The
    producer of the lowest missing index never waits for another producer: no deadlock.
    """

    def __init__(self, capacity: int, stop: StopSignal) -> None:
        self._capacity = capacity
        self._stop = stop
        self._changed = stop.condition()
        self._items: dict[int, T] = {}
        self._taken = 0
        self.put_wait = 0.0
        """Seconds that producers spent waiting for room, all together."""
        self.get_wait = 0.0
        """Seconds that the consumer spent waiting for an item."""

    def put(self, index: int, item: T) -> None:
        with self._changed:
            if index < self._taken or index in self._items:
                raise ValueError(f"item {index} was put twice")
            self.put_wait += self._stop.wait(
                self._changed, lambda: index < self._taken + self._capacity
            )
            self._items[index] = item
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self.get_wait += self._stop.wait(self._changed, lambda: self._taken in self._items)
            item = self._items.pop(self._taken)
            self._taken += 1
            self._changed.notify_all()
            return item


class Rendezvous:
    """`wait` returns when all parties have called it; then the next round begins."""

    def __init__(self, parties: int, stop: StopSignal) -> None:
        self._parties = parties
        self._stop = stop
        self._changed = stop.condition()
        self._arrived = 0
        self._round = 0

    def wait(self) -> float:
        """Seconds waited."""
        with self._changed:
            self._stop.check()
            mine = self._round
            self._arrived += 1
            if self._arrived == self._parties:
                self._arrived = 0
                self._round += 1
                self._changed.notify_all()
                return 0.0
            return self._stop.wait(self._changed, lambda: self._round != mine)


class SingleFlight(Generic[K, T]):
    """A dictionary that fills itself: the first who asks for a key makes it, the others wait."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop
        self._changed = stop.condition()
        self._values: dict[K, T] = {}
        self._running: set[K] = set()

    def get(self, key: K, make: Callable[[], T]) -> T:
        with self._changed:
            self._stop.wait(self._changed, lambda: key not in self._running)
            if key in self._values:
                return self._values[key]
            self._running.add(key)
        try:
            value = make()
            with self._changed:
                self._values[key] = value
            return value
        finally:  # after a failure the next who asks tries again
            with self._changed:
                self._running.discard(key)
                self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._values)


class Turnstile:
    """Ranks 0, 1, 2, … pass one at a time and in order; `closed` waits until all have passed."""

    def __init__(self, ranks: int, stop: StopSignal) -> None:
        self._ranks = ranks
        self._stop = stop
        self._changed = stop.condition()
        self._passed = 0

    def run(self, rank: int, action: Callable[[], T]) -> T:
        with self._changed:
            self._stop.wait(self._changed, lambda: self._passed == rank)
        result = action()
        with self._changed:
            self._passed += 1
            self._changed.notify_all()
        return result

    def wait_all(self) -> None:
        with self._changed:
            self._stop.wait(self._changed, lambda: self._passed == self._ranks)


class Tickets:
    """0, 1, …, total-1, each handed out once."""

    def __init__(self, first: int, total: int) -> None:
        self._lock = threading.Lock()
        self._next = first
        self._total = total

    def take(self) -> int | None:
        """The next ticket; None when there are no more."""
        with self._lock:
            if self._next >= self._total:
                return None
            self._next += 1
            return self._next - 1


class WorkerGroup:
    """Named threads that stand or fall together.

        with WorkerGroup() as group:
            group.start("target-0", work)
            group.wait()          # raises WorkerFailed, the traceback is on stderr by then

    Leaving the block, however, stops and joins the threads. `stuck` names those that did not end
    within `join_timeout` seconds (a long computation cannot be interrupted); they are daemons.
    """

    def __init__(self, *, stop: StopSignal | None = None, join_timeout: float = 10.0) -> None:
        self.stop = stop if stop is not None else StopSignal()
        self.stuck: tuple[str, ...] = ()
        self._join_timeout = join_timeout
        self._changed = self.stop.condition()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._failure: tuple[str, BaseException] | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        # torch >= 2.12 keeps compiler settings in context variables, and a plain thread starts
        # from the defaults: give it the starter's context.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._body, name, work), name=name, daemon=True
        )
        with self._changed:
            self._threads.append(thread)
            self._running += 1
        _started.add(thread)
        thread.start()

    def wait(self) -> None:
        """Until all have ended. The first failure stops the others and raises WorkerFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0 or self.stop.is_set())
        if self.stop.is_set():
            self.join()
        self._raise_failure()

    def join(self) -> None:
        """Stop those that still run and wait for them, for `join_timeout` seconds at most."""
        with self._changed:
            running = self._running
        if running:  # else the signal stays unset, for the next group of the same run
            self.stop.set()
        deadline = time.monotonic() + self._join_timeout
        try:
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C ends the waiting; who still runs is said all the same
            self.stuck = tuple(thread.name for thread in self._threads if thread.is_alive())

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.join()
        if kind is None:
            self._raise_failure()

    def _body(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread hears it
            self._fail(name, error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _fail(self, name: str, error: BaseException) -> None:
        with self._changed:
            first = self._failure is None
            if first:
                self._failure = (name, error)
        if first:  # before the stop: nothing that the stop makes others say comes ahead of it
            report = "".join(traceback.format_exception(error))
            sys.stderr.write(f"\nthread {name} failed:\n{report}")
            sys.stderr.flush()
        self.stop.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            name, error = self._failure
            raise WorkerFailed(name, error) from error


def share(
    workers: Mapping[str, Callable[[int], None]], total: int, *, stop: StopSignal | None = None
) -> None:
    """Pieces 0..total-1: each worker (by name) takes the next one until none is left.

    WorkerFailed if one fails. What a piece gives must not depend on who takes it.
    """
    tickets = Tickets(0, total)

    def take(work: Callable[[int], None], signal: StopSignal) -> None:
        while (number := tickets.take()) is not None:
            signal.check()
            work(number)

    with WorkerGroup(stop=stop) as group:
        for name, work in workers.items():
            group.start(name, partial(take, work, group.stop))
        group.wait()


def any_alive() -> bool:
    """Whether a worker of any group still runs: one that did not end when it was told to."""
    return any(thread.is_alive() for thread in list(_started))
