"""threads(): what is kept, who waits for whom, and the ways to have it printed. No torch."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchcompat
from torchcompat import activity, stacks, thread_view
from torchcompat.activity import Doing
from torchcompat.errors import ConfigError
from torchcompat.stacks import Frame

WAIT_S = 30.0


@contextmanager
def doing(worker: Any, kind: Any, what: Any, holder: Any = None) -> Iterator[int]:
    """A thread that stands still in `kind` for the body; its number."""
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with Doing(kind, what, holder):
            inside.set()
            assert leave.wait(WAIT_S)

    thread = worker(work)
    assert inside.wait(WAIT_S)
    try:
        yield thread.ident
    finally:
        leave.set()
        thread.get()


def sample() -> None: ...


def test_who_waits_for_whose_compile_of_what(worker: Any) -> None:
    lock = threading.RLock()
    held, leave = threading.Event(), threading.Event()

    def compiles() -> None:
        with lock, Doing("compile", sample.__code__):
            held.set()
            assert leave.wait(WAIT_S)

    thread = worker(compiles)
    assert held.wait(WAIT_S)
    try:
        with (
            doing(worker, "wait_compile", sample.__code__, lock) as same,
            doing(worker, "wait_compile", Frame.is_in.__code__, lock) as other,
        ):
            view = torchcompat.threads()
        assert (view[same].holder, view[other].holder) == (thread.ident, thread.ident)
        name = threading._active[thread.ident].name  # type: ignore[attr-defined]
        place = f"sample ({__file__}:{sample.__code__.co_firstlineno})"
        assert view[thread.ident].does == f"compiles {place}"
        assert view[same].does == f"waits to compile {place}; {name} compiles the same"
        assert view[other].does.endswith(f"; {name} compiles {place}")
        assert view[same].waits
        assert view[same].seconds is not None
        assert not view.circles
    finally:
        leave.set()
        thread.get()
    assert view[other].does in str(view)
    assert view.to_dict()["threads"][0]["waits"]


def test_threads_that_wait_for_each_other_are_named(worker: Any) -> None:
    me = threading.get_ident()
    with doing(worker, "wait_gate", "reset()", me) as first:
        with Doing("wait_compile", "f", first):
            view = torchcompat.threads()
    assert {frozenset(circle) for circle in view.circles} == {
        frozenset({view[first].name, threading.current_thread().name})
    }
    assert "wait for each other, for ever" in str(view)


def test_nothing_is_kept_after_the_end_also_of_nested_and_failed_work() -> None:
    with pytest.raises(ZeroDivisionError):
        with Doing("compile", "outer"), Doing("wait_backward", "inner") as inner:
            assert [e.what for e in activity.entries()[threading.get_ident()]] == ["outer", "inner"]
            inner.now("backward")
            assert activity.entries()[threading.get_ident()][-1].kind == "backward"
            raise ZeroDivisionError
    assert threading.get_ident() not in activity.entries()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_knows_of_its_own_thread_only(worker: Any) -> None:
    with doing(worker, "compile", "f") as other:
        assert other in activity.entries()
        with Doing("compile", "mine"):
            child = os.fork()
            if child == 0:
                os._exit(0 if list(activity.entries()) == [threading.get_ident()] else 1)
            assert os.waitpid(child, 0)[1] == 0


def test_a_wait_for_an_import_names_module_and_importer(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = "imported_by_a_test_of_threads"
    (tmp_path / f"{name}.py").write_text(f"import sys\nsys.{name}()\n")
    inside, leave = threading.Event(), threading.Event()

    def stand_still() -> None:
        inside.set()
        assert leave.wait(WAIT_S)

    monkeypatch.setattr(sys, name, stand_still, raising=False)
    importer = worker(lambda: importlib.import_module(name))
    assert inside.wait(WAIT_S)
    waiter = worker(lambda: importlib.import_module(name))
    try:
        blocking: Any = sys.modules["_frozen_importlib"]._blocking_on  # type: ignore[attr-defined]
        while blocking.get(waiter.ident) is None:  # bounded by the test's own time-out
            assert waiter.is_alive()
        for _ in range(1000):
            view = torchcompat.threads()[waiter.ident]
            if view.kind == "wait_import":
                break
        assert (view.kind, view.what, view.holder) == ("wait_import", name, importer.ident)
        assert view.waits
    finally:
        leave.set()
        importer.get()
        waiter.get()
        sys.modules.pop(name, None)


TORCH = "/x/site-packages/torch"
DYNAMO = Frame(f"{TORCH}/_dynamo/convert_frame.py", 9, "_compile")
FX = Frame(f"{TORCH}/fx/_symbolic_trace.py", 9, "trace")
MAKE_FX = Frame(f"{TORCH}/fx/experimental/proxy_tensor.py", 9, "_trace_inner")
WRAPPER = Frame(f"{TORCH}/_dynamo/eval_frame.py", 9, "compile_wrapper")
BACKWARD = Frame(f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py", 9, "get_or_compile")
OLD_BACKWARD = BACKWARD._replace(name="_backward_impl")
RUNS = Frame(f"{TORCH}/_functorch/_aot_autograd/utils.py", 9, "call_func_at_runtime_with_args")
INDUCTOR = Frame(f"{TORCH}/_inductor/compile_fx.py", 9, "compile_fx")
EXPORT = Frame(f"{TORCH}/export/_trace.py", 9, "_export")
USER = Frame("/home/train.py", 12, "step")


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([USER], "other"),
        ([WRAPPER, USER], "compiled_call"),
        ([FX, USER], "fx"),
        ([FX, MAKE_FX, USER], "make_fx"),
        ([FX, MAKE_FX, DYNAMO, WRAPPER, USER], "compile"),
        ([DYNAMO, EXPORT, USER], "export"),
        ([MAKE_FX, BACKWARD, USER], "backward"),
        ([INDUCTOR, OLD_BACKWARD, USER], "backward"),
        ([OLD_BACKWARD, USER], "other"),
        ([USER, RUNS, OLD_BACKWARD, USER], "other"),
        ([USER, OLD_BACKWARD, USER], "backward"),
        ([DYNAMO._replace(file="/home/convert_frame.py"), USER], "other"),
    ],
)
def test_what_frames_say(frames: list[Frame], kind: str) -> None:
    assert stacks.kind_of(frames)[0] == kind
    assert stacks.caller(frames, 0) == USER or frames[0].name == "_compile"


def test_frames_are_those_of_each_thread(worker: Any) -> None:
    with doing(worker, "other", "") as ident:
        view = torchcompat.threads()[ident]
    assert len(view.frames) == thread_view.TOP
    assert view.frames[0].endswith("in wait")
    assert any(f"{__file__}:" in frame and "in work" in frame for frame in view.frames)


def test_a_signal_writes_the_view_and_calls_who_was_there_before(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with (tmp_path / "out").open("w+") as file, Doing("compile", "f (x.py:1)"):
            undo = torchcompat.threads_on_signal(file=file)
            os.kill(os.getpid(), signal.SIGUSR2)
            while not seen:  # a handler runs between two steps of Python code
                pass
            undo()
            file.seek(0)
            assert "compiles f (x.py:1)" in file.read()
        assert seen == [signal.SIGUSR2]
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR2, before)


# The main thread waits for a lock that it will not get and holds every lock that printing, naming
# temporary files, listing threads and importing could want.
STUCK = """
import os, signal, sys, tempfile, threading, _imp
import torchcompat
from torchcompat.activity import Doing
torchcompat.threads_on_signal("SIGUSR2", 2)
lock = threading.RLock()
ready = threading.Event()
def owner():
    with lock, Doing("compile", "f (x.py:1)"):
        ready.set()
        print("ready", flush=True)
        sys.stdin.readline()
        os._exit(0)
threading.Thread(target=owner, name="owner", daemon=True).start()
ready.wait()
with threading._active_limbo_lock, tempfile._once_lock, Doing("wait_compile", "f (x.py:1)", lock):
    _imp.acquire_lock()
    lock.acquire()
"""


def test_a_main_thread_that_is_stuck_with_all_locks_answers() -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", STUCK],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        killer = threading.Timer(WAIT_S, process.kill)
        killer.start()
        lines: list[str] = []
        os.kill(process.pid, signal.SIGUSR2)
        while not any("owner compiles the same" in line for line in lines[-1:]):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
            if lines[-1].startswith("MainThread") and "waits" not in lines[-1]:
                os.kill(process.pid, signal.SIGUSR2)  # it was on its way to the lock
        process.stdin.write("end\n")
        process.stdin.close()
        process.wait(WAIT_S)
        killer.cancel()
    assert "MainThread" in lines[-1]


def test_the_watchdog_writes_while_somebody_waits_long(worker: Any) -> None:
    reading, writing = os.pipe()
    undo = torchcompat.threads_every(0.05, writing)
    try:
        with doing(worker, "wait_compile", "f (x.py:1)"):
            first = os.read(reading, 4096).decode()
    finally:
        undo()
    assert "threads" in first
    assert "waits to compile f (x.py:1); nobody known has it" in first


def test_the_watchdog_begins_as_the_variable_says_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    monkeypatch.setattr(thread_view, "threads_every", lambda s: begun.append(s) or (lambda: None))
    monkeypatch.setattr(thread_view, "_watched", [])
    thread_view.watch_as_told({})
    assert not begun
    for _ in range(2):
        thread_view.watch_as_told({"TORCHCOMPAT_DUMP": "60"})
    assert begun == [60.0]
    monkeypatch.setattr(thread_view, "_watched", [])
    with pytest.raises(ConfigError, match="TORCHCOMPAT_DUMP is 'soon'"):
        thread_view.watch_as_told({"TORCHCOMPAT_DUMP": "soon"})


def test_bad_input_is_told(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'SIGNONE' is no signal here"):
        torchcompat.threads_on_signal("SIGNONE")
    with pytest.raises(ConfigError, match="no file descriptor"):
        torchcompat.threads_on_signal("SIGUSR2", object())
    with pytest.raises(ConfigError, match="in the main thread"):
        worker(lambda: torchcompat.threads_on_signal("SIGUSR2", 2)).get()
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="no number of seconds"):
            torchcompat.threads_every(seconds)


def test_the_package_loads_nothing_before_it_is_used_and_the_view_no_torch() -> None:
    root = str(Path(__file__).parents[2])
    program = """
import sys
import torchcompat
assert not [m for m in sys.modules if m.startswith("torchcompat.")]
assert "threads" in dir(torchcompat)
try:
    torchcompat.thread
except AttributeError as e:
    assert "no attribute 'thread'" in str(e)
torchcompat.threads()
assert "torch" not in sys.modules
assert torchcompat.errors.PatchNotApplied.__module__ == "torchcompat"
print("right")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr
