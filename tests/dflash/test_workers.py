from __future__ import annotations

import contextvars
import sys
import threading
import time

import pytest

from dflash.errors import WorkerFailed
from dflash.workers import (
    OrderedChannel,
    Rendezvous,
    SingleFlight,
    Stopped,
    StopSignal,
    Tickets,
    Turnstile,
    WorkerGroup,
    any_alive,
    share,
)

LIMIT = 10.0  # no wait in this file is longer


def run_thread(work):
    """Start work in a thread; the box it returns gets its result or its exception."""
    box = {}

    def body():
        try:
            box["result"] = work()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    box["thread"] = thread
    return box


def finish(box):
    box["thread"].join(LIMIT)
    assert not box["thread"].is_alive(), "still waiting"
    return box


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def eager_switching():
    """Threads change places as often as they can, so that a race shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# --- OrderedChannel -------------------------------------------------------------------------------


def test_channel_gives_items_in_order_of_index_not_of_arrival():
    channel = OrderedChannel(3, StopSignal())
    for index in (2, 0, 1):
        channel.put(index, f"item {index}")
    assert [channel.get() for _ in range(3)] == ["item 0", "item 1", "item 2"]


def test_channel_is_bounded_and_put_waits_for_room():
    channel = OrderedChannel(2, StopSignal())
    channel.put(0, "a")
    channel.put(1, "b")
    late = run_thread(lambda: channel.put(2, "c"))
    late["thread"].join(0.05)
    assert late["thread"].is_alive()
    assert channel.get() == "a"
    finish(late)
    assert "error" not in late
    assert channel.put_wait > 0
    assert (channel.get(), channel.get()) == ("b", "c")


def test_channel_producer_of_the_missing_item_is_never_blocked_by_later_ones():
    channel = OrderedChannel(1, StopSignal())
    later = run_thread(lambda: channel.put(1, "b"))
    later["thread"].join(0.05)
    assert later["thread"].is_alive()
    channel.put(0, "a")  # would deadlock if the waiting producer took the room
    assert channel.get() == "a"
    finish(later)
    assert channel.get() == "b"


def test_channel_many_producers_keep_the_order():
    channel = OrderedChannel(2, StopSignal())
    tickets = Tickets(0, 200)

    def produce():
        while (ticket := tickets.take()) is not None:
            channel.put(ticket, ticket)

    producers = [run_thread(produce) for _ in range(4)]
    assert [channel.get() for _ in range(200)] == list(range(200))
    for producer in producers:
        assert "error" not in finish(producer)


def test_channel_refuses_the_same_index_twice():
    channel = OrderedChannel(2, StopSignal())
    channel.put(0, "a")
    with pytest.raises(ValueError, match="item 0 was put twice"):
        channel.put(0, "a")


# --- the stop reaches every wait ------------------------------------------------------------------


def waits(stop):
    full = OrderedChannel(1, stop)
    full.put(0, None)
    busy = SingleFlight(stop)
    held = threading.Event()
    run_thread(lambda: busy.get("key", lambda: held.wait(LIMIT)))
    until(lambda: busy._running)
    return {
        "put": lambda: full.put(1, None),
        "get": OrderedChannel(1, stop).get,
        "rendezvous": Rendezvous(2, stop).wait,
        "single flight": lambda: busy.get("key", lambda: None),
        "turnstile": lambda: Turnstile(2, stop).run(1, lambda: None),
        "turnstile end": Turnstile(1, stop).wait_all,
    }, held


def test_stop_wakes_every_wait_at_once():
    stop = StopSignal()
    actions, held = waits(stop)
    boxes = {name: run_thread(action) for name, action in actions.items()}
    time.sleep(0.05)
    assert all(box["thread"].is_alive() for box in boxes.values())
    started = time.monotonic()
    stop.set()
    for name, box in boxes.items():
        assert isinstance(finish(box).get("error"), Stopped), name
    assert time.monotonic() - started < 1.0
    held.set()


def test_waits_after_the_stop_do_not_begin():
    stop = StopSignal()
    actions, held = waits(stop)
    stop.set()
    for action in actions.values():
        with pytest.raises(Stopped):
            action()
    held.set()


# --- Rendezvous -----------------------------------------------------------------------------------


def test_rendezvous_never_lets_a_fast_party_run_ahead():
    parties, rounds = 3, 100
    meet = Rendezvous(parties, StopSignal())
    counts = [0] * parties
    torn = []

    def party(rank):
        for _ in range(rounds):
            counts[rank] += 1
            meet.wait()
            if len(set(counts)) != 1:
                torn.append(list(counts))
            meet.wait()

    boxes = [run_thread(lambda rank=rank: party(rank)) for rank in range(parties)]
    for box in boxes:
        assert "error" not in finish(box)
    assert torn == []
    assert counts == [rounds] * parties


# --- SingleFlight ---------------------------------------------------------------------------------


def test_single_flight_makes_a_key_once_for_all_who_ask():
    flight = SingleFlight(StopSignal())
    calls = []
    entered, release = threading.Event(), threading.Event()

    def make():
        calls.append(1)
        entered.set()
        assert release.wait(LIMIT)
        return object()

    boxes = [run_thread(lambda: flight.get("k", make)) for _ in range(4)]
    assert entered.wait(LIMIT)
    release.set()
    results = [finish(box)["result"] for box in boxes]
    assert len(calls) == 1
    assert all(result is results[0] for result in results)


def test_single_flight_different_keys_run_side_by_side():
    flight = SingleFlight(StopSignal())
    both = threading.Barrier(2, timeout=LIMIT)
    boxes = [run_thread(lambda key=key: flight.get(key, both.wait)) for key in "ab"]
    for box in boxes:
        assert "error" not in finish(box)
    assert len(flight) == 2


def test_single_flight_after_a_failure_the_next_one_tries():
    flight = SingleFlight(StopSignal())
    entered, release = threading.Event(), threading.Event()

    def fail():
        entered.set()
        assert release.wait(LIMIT)
        raise OSError("disk")

    first = run_thread(lambda: flight.get("k", fail))
    assert entered.wait(LIMIT)
    second = run_thread(lambda: flight.get("k", lambda: "made"))
    release.set()
    assert isinstance(finish(first)["error"], OSError)
    assert finish(second)["result"] == "made"


# --- Turnstile, Tickets ---------------------------------------------------------------------------


def test_turnstile_lets_ranks_pass_in_order_and_one_at_a_time():
    stop = StopSignal()
    turnstile = Turnstile(3, stop)
    log = []
    inside = []

    def action(rank):
        inside.append(rank)
        log.append((rank, len(inside)))
        time.sleep(0.002)
        inside.remove(rank)

    end = run_thread(turnstile.wait_all)
    boxes = [run_thread(lambda r=r: turnstile.run(r, lambda: action(r))) for r in (2, 1, 0)]
    for box in [*boxes, end]:
        assert "error" not in finish(box)
    assert log == [(0, 1), (1, 1), (2, 1)]


def test_tickets_are_handed_out_once_each():
    tickets = Tickets(5, 505)
    taken = [[] for _ in range(4)]

    def take(mine):
        while (ticket := tickets.take()) is not None:
            mine.append(ticket)

    for box in [run_thread(lambda mine=mine: take(mine)) for mine in taken]:
        finish(box)
    assert sorted(t for mine in taken for t in mine) == list(range(5, 505))


# --- WorkerGroup ----------------------------------------------------------------------------------


def test_group_ends_when_all_workers_have():
    done = []
    with WorkerGroup() as group:
        for i in range(3):
            group.start(f"w{i}", lambda i=i: done.append(i))
        group.wait()
    assert sorted(done) == [0, 1, 2]
    assert group.stuck == ()


def test_group_first_failure_stops_all_and_its_traceback_comes_first(capsys):
    group = WorkerGroup()
    channel = OrderedChannel(1, group.stop)
    waiting = threading.Event()

    def consume():
        waiting.set()
        channel.get()

    def break_down():
        assert waiting.wait(LIMIT)
        raise ZeroDivisionError("the reason")

    def fail_later():
        while not group.stop.is_set():
            time.sleep(0.001)
        raise RuntimeError("a consequence")

    started = time.monotonic()
    with pytest.raises(WorkerFailed) as caught, group:
        group.start("drafter-0", consume)
        group.start("drafter-1", fail_later)
        group.start("target-0", break_down)
        group.wait()
    assert time.monotonic() - started < 2.0
    assert caught.value.thread_name == "target-0"
    assert isinstance(caught.value.cause, ZeroDivisionError)
    err = capsys.readouterr().err
    assert err.lstrip().startswith("thread target-0 failed:\nTraceback")
    assert "in break_down" in err
    assert "a consequence" not in err


def test_group_failure_is_raised_even_if_nobody_waited():
    group = WorkerGroup()

    def fail():
        raise ValueError("x")

    with pytest.raises(WorkerFailed, match="'w' failed: ValueError: x"), group:
        group.start("w", fail)
        until(group.stop.is_set)


def test_group_an_error_in_the_block_is_not_hidden_by_the_workers():
    group = WorkerGroup()
    channel = OrderedChannel(1, group.stop)
    with pytest.raises(KeyboardInterrupt), group:
        group.start("w", channel.get)
        raise KeyboardInterrupt
    assert group.stuck == ()


def test_group_names_a_worker_that_does_not_end():
    release = threading.Event()
    group = WorkerGroup(join_timeout=0.05)
    with group:
        group.start("deaf", lambda: release.wait(LIMIT))
        group.start("fine", lambda: None)
    assert group.stuck == ("deaf",)
    release.set()


def test_an_interrupt_while_waiting_for_the_end_still_says_who_runs(monkeypatch):
    leave = threading.Event()
    group = WorkerGroup()
    group.start("deaf", lambda: leave.wait(20))

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            group.join()
    assert group.stuck == ("deaf",)
    leave.set()
    group.join()
    assert group.stuck == ()


def test_workers_see_the_context_variables_of_the_starter():
    variable = contextvars.ContextVar("variable", default="default")
    token = variable.set("set by main")
    seen = []
    try:
        with WorkerGroup() as group:
            group.start("w", lambda: seen.append(variable.get()))
            group.wait()
    finally:
        variable.reset(token)
    assert seen == ["set by main"]


def test_a_group_that_ended_well_leaves_the_signal_for_the_next_one():
    stop = StopSignal()
    for _ in range(2):
        with WorkerGroup(stop=stop) as group:
            group.start("w", lambda: None)
            group.wait()
    assert not stop.is_set()


# --- share, any_alive -----------------------------------------------------------------------------


def test_share_does_each_piece_once():
    done = [[], []]
    workers = {f"target-{i}": mine.append for i, mine in enumerate(done)}
    share(workers, 300)
    assert sorted(done[0] + done[1]) == list(range(300))


def test_share_a_failure_stops_the_others():
    taken = []

    def fail(piece):
        raise LookupError(f"piece {piece}")

    def work(piece):
        taken.append(piece)
        time.sleep(0.001)

    with pytest.raises(WorkerFailed, match="'bad' failed: LookupError"):
        share({"bad": fail, "good": work}, 100_000)
    assert len(taken) < 50_000


def test_share_of_nothing():
    share({"w": lambda piece: 1 / 0}, 0)


def test_any_alive_knows_a_worker_that_hangs():
    release = threading.Event()
    with WorkerGroup(join_timeout=0.01) as group:
        group.start("deaf", lambda: release.wait(LIMIT))
    assert any_alive()
    release.set()
    until(lambda: not any_alive())
