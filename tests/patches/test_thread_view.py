"""threads() beside real compiles: each thread stands still where the view is to find it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interleaving import WAIT_S, Gate, Worker, tracing
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

import torchcompat
from torchcompat.thread_view import ThreadView

x = torch.ones(4)
# CUDA builds up to 2.11 without a GPU crash unless the main thread is the first to compile.
torch.compile(lambda y: y + 1, backend="eager")(x)


def first(y: torch.Tensor) -> torch.Tensor:
    return y.sin()


def second(y: torch.Tensor) -> torch.Tensor:
    return y.cos()


class Standing:
    """Stands still when called, until `leave` is set."""

    def __init__(self) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.inside.set()
        assert self.leave.wait(WAIT_S)

    def backend(self, gm: fx.GraphModule, _: Any) -> Any:
        self()
        return gm.forward

    @contextmanager
    def while_inside(self, *workers: Worker) -> Iterator[None]:
        assert self.inside.wait(WAIT_S)
        try:
            yield
        finally:
            self.leave.set()
            for worker in workers:
                worker.get()


def seen(worker: Worker, is_it: Callable[[ThreadView], bool]) -> ThreadView:
    """What the view says of `worker`, once it has come so far."""
    end = time.monotonic() + WAIT_S
    while True:
        view = torchcompat.threads()[worker.ident or 0]
        if is_it(view):
            return view
        assert time.monotonic() < end, view
        time.sleep(0.01)


def place(function: Any) -> str:
    return f"{function.__name__} ({__file__}:{function.__code__.co_firstlineno})"


def test_a_compile_and_who_waits_for_it(patched: None) -> None:
    standing = Standing()
    f = torch.compile(first, backend=standing.backend)
    g = torch.compile(second, backend="eager")
    compiles = Worker(lambda: f(x))
    assert standing.inside.wait(WAIT_S)
    same, other = Worker(lambda: f(x)), Worker(lambda: g(x))
    with standing.while_inside(compiles, same, other):
        waits = seen(same, lambda v: v.kind == "wait_compile")
        waits_too = seen(other, lambda v: v.kind == "wait_compile")
        view = torchcompat.threads()
        assert view[compiles.ident or 0].does == f"compiles {place(first)}"
        assert waits.does == f"waits to compile {place(first)}; {compiles.name} compiles the same"
        assert waits_too.does == (
            f"waits to compile {place(second)}; {compiles.name} compiles {place(first)}"
        )
        assert waits.holder == waits_too.holder == compiles.ident
        assert waits.seconds is not None
        assert not view.circles
    after = torchcompat.threads()
    assert not [v for v in after if v.kind in ("compile", "wait_compile")]


def test_without_patches_the_frames_and_torchs_lock_tell() -> None:
    standing = Standing()
    f = torch.compile(first, backend=standing.backend)
    g = torch.compile(second, backend="eager")
    compiles = Worker(lambda: f(x))
    assert standing.inside.wait(WAIT_S)
    other = Worker(lambda: g(x))
    with standing.while_inside(compiles, other):
        waits = seen(other, lambda v: v.kind == "wait_compile")
        view = torchcompat.threads()[compiles.ident or 0]
        assert view.kind == "compile"
        assert view.what.startswith(f"what is called at {__file__}:")
        assert waits.holder == compiles.ident
        assert f"called at {__file__}:" in waits.what
        assert waits.seconds is None
        assert f"; {compiles.name} compiles what is called at" in waits.does
    torch._dynamo.reset()


def backward_that_stands(standing: Standing) -> Any:
    def bw_compiler(gm: fx.GraphModule, _: Any) -> Any:
        standing()
        return make_boxed_func(gm.forward)

    fw_compiler: Any = lambda gm, _: make_boxed_func(gm.forward)  # noqa: E731
    backend = aot_autograd(fw_compiler=fw_compiler, bw_compiler=bw_compiler)
    return torch.compile(first, backend=backend)


def test_a_lazy_backward_and_who_waits_for_it(patched: None) -> None:
    standing = Standing()
    f = backward_that_stands(standing)
    losses = [f(torch.randn(4, requires_grad=True)).sum() for _ in range(2)]
    compiles = Worker(losses[0].backward)
    assert standing.inside.wait(WAIT_S)
    waits = Worker(losses[1].backward)
    with standing.while_inside(compiles, waits):
        waiting = seen(waits, lambda v: v.kind == "wait_backward")
        view = torchcompat.threads()[compiles.ident or 0]
        assert view.kind == "backward"
        assert view.what.startswith(place(first))
        assert waiting.holder == compiles.ident
        assert waiting.does.endswith(f"; {compiles.name} compiles the same")


def test_a_lazy_backward_without_patches() -> None:
    standing = Standing()
    loss = backward_that_stands(standing)(torch.randn(4, requires_grad=True)).sum()
    compiles = Worker(loss.backward)
    with standing.while_inside(compiles):
        assert torchcompat.threads()[compiles.ident or 0].kind == "backward"
    torch._dynamo.reset()


def test_traces_and_compiled_code() -> None:
    with tracing(Gate()) as worker:
        assert torchcompat.threads()[worker.ident or 0].kind == "fx"

    standing = Standing()

    def function(y: torch.Tensor) -> torch.Tensor:
        standing()
        return y.sin()

    worker = Worker(lambda: make_fx(function)(x))
    with standing.while_inside(worker):
        view = torchcompat.threads()[worker.ident or 0]
        assert view.kind == "make_fx"
        assert __file__ in view.what

    standing = Standing()
    compiled = torch.compile(
        first, backend=lambda gm, _: lambda *args: (standing(), gm.forward(*args))[1]
    )
    worker = Worker(lambda: compiled(x))
    with standing.while_inside(worker):
        assert torchcompat.threads()[worker.ident or 0].kind == "compiled_call"
    torch._dynamo.reset()


def test_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = Standing()

    class Module(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            standing()
            return y.sin()

    worker = Worker(lambda: torch.export.export(Module(), (x,), strict=False))
    with standing.while_inside(worker):
        assert torchcompat.threads()[worker.ident or 0].kind == "export"


def test_the_gate_of_a_reset_names_who_is_in_the_way(patched: None) -> None:
    standing = Standing()

    @torch._dynamo.disable
    def stand_still() -> None:
        standing()

    def function(y: torch.Tensor) -> torch.Tensor:
        z = y.sin()
        stand_still()
        return z + 1

    f = torch.compile(function, backend="eager")
    g = torch.compile(second, backend="eager")
    g(x)
    call = Worker(lambda: f(x))
    assert standing.inside.wait(WAIT_S)
    reset = Worker(torch._dynamo.reset)
    waiting = seen(reset, lambda v: v.kind == "wait_calls" and v.holder is not None)
    late = Worker(lambda: g(x))
    with standing.while_inside(call, reset, late):
        assert waiting.holder == call.ident
        assert waiting.what == "torch._dynamo.reset()"
        before_gate = seen(late, lambda v: v.kind == "wait_gate")
        assert before_gate.holder == reset.ident
        assert before_gate.does.startswith("waits at the gate of torch._dynamo.reset(); ")


# Stock torch's dead lock of an import and a compile (patch import_lock), which nothing ends.
CIRCLE = """
import importlib, os, sys, threading, time
import torch
import torchcompat
folder, = sys.argv[1:]
sys.path.insert(0, folder)
x = torch.ones(4)
torch.compile(lambda y: y + 1, backend="eager")(x)
sys.inside, sys.go = threading.Event(), threading.Event()
with open(os.path.join(folder, "half.py"), "w") as file:
    file.write(
        "import sys, torch\\n"
        "def scaled(y): return y * FACTOR\\n"
        "FACTOR = 3.0\\n"
        "sys.inside.set()\\n"
        "assert sys.go.wait(30)\\n"
        "torch.compile(lambda y: y - 1, backend='eager')(torch.ones(4))\\n"
    )
def start(work, name):
    threading.Thread(target=work, name=name, daemon=True).start()
start(lambda: importlib.import_module("half"), "importer")
assert sys.inside.wait(30)
scaled = sys.modules["half"].scaled
start(lambda: torch.compile(lambda y: scaled(y) + 1, backend="eager")(x), "compiler")
end = time.monotonic() + 60
while not any(v.name == "compiler" and v.kind == "wait_import" for v in torchcompat.threads()):
    assert time.monotonic() < end, torchcompat.threads()
sys.go.set()
while not (view := torchcompat.threads()).circles:
    assert time.monotonic() < end, view
print(view, flush=True)
os._exit(0)
"""


def test_a_dead_lock_of_stock_torch_is_named_as_one(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CIRCLE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[1] in (
        "wait for each other, for ever: importer -> compiler -> importer",
        "wait for each other, for ever: compiler -> importer -> compiler",
    )
    compiler = next(line for line in lines if line.startswith("compiler"))
    assert "waits for the import of half; importer waits to compile what is called at" in compiler
