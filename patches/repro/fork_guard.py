"""A worker is forked while another thread compiles; it calls compiled code of its own."""

from __future__ import annotations

import os
import sys
import threading
import time

import harness
import torch

if not hasattr(os, "fork"):
    print(f"torch {torch.__version__}: this system does not fork")
    sys.exit(2)
harness.warm_up()
harness.apply_patches("fork_guard")
faults = []
compiling, leave = threading.Event(), threading.Event()


def slow(gm: torch.fx.GraphModule, _: object) -> object:
    compiling.set()
    leave.wait(harness.WAIT_S)
    return gm.forward


model = torch.compile(lambda y: y.sin(), backend=slow)
transform = torch.compile(lambda y: y / 255, backend="eager")
x = torch.full((2,), 255.0)
compile_thread = harness.Worker(lambda: model(x))
compiling.wait(harness.WAIT_S)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(transform(x), torch.ones(2)) else 3)
end = time.monotonic() + 15
ended, status = 0, 0
while not ended and time.monotonic() < end:
    ended, status = os.waitpid(child, os.WNOHANG)
    time.sleep(0.05)
if not ended:
    os.kill(child, 9)
    os.waitpid(child, 0)
    faults.append("a forked worker hangs in its first compiled call")
elif status:
    faults.append(f"a forked worker ended with {os.waitstatus_to_exitcode(status)}")
leave.set()
compile_thread.finish()
if compile_thread.error is not None:
    faults.append(f"the compile raised {harness.first_line(compile_thread.error)[:80]}")
if not torch.equal(transform(x), torch.ones(2)):
    faults.append("the parent computes something wrong")
harness.verdict(faults)
