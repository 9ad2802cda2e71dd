"""`torch._dynamo.reset()` while another thread stands in its first compiled call.

A crash is what stock torch ends in, so the dangerous part runs in a child process. The other
thread is held where it always is for a while: between looking its function up and having it
compiled. Then the cache that it looked into is freed.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import harness
import torch

if len(sys.argv) == 1:
    ran = subprocess.run(
        [sys.executable, __file__, "child"], capture_output=True, text=True, timeout=90
    )
    said = [line for line in ran.stdout.splitlines() if line.startswith("torch ")]
    if ran.returncode in (0, 1) and said:
        print(said[-1])
        sys.exit(ran.returncode)
    harness.verdict([f"reset() beside compiled calls ended the process: exit {ran.returncode}"])

harness.warm_up()
harness.apply_patches("dynamo_reset")
faults = []
sys.setswitchinterval(1e-5)
inside, leave, reset_began = threading.Event(), threading.Event(), threading.Event()
reset_ended = threading.Event()


def held(gm: torch.fx.GraphModule, _: object) -> object:
    inside.set()
    leave.wait(harness.WAIT_S)
    return gm.forward


slow = torch.compile(lambda x: x.sin() + 1, backend=held)
call = harness.Worker(lambda: slow(torch.ones(4)))
inside.wait(harness.WAIT_S)


def reset() -> None:
    reset_began.set()
    torch._dynamo.reset()
    reset_ended.set()


resetting = harness.Worker(reset)
reset_began.wait(harness.WAIT_S)
leave.set()
for worker in (call.finish(), resetting.finish()):
    if worker.error is not None:
        faults.append(f"raised {harness.first_line(worker.error)[:100]}")
if call.error is None and not torch.equal(call.result, torch.ones(4).sin() + 1):
    faults.append("the call under way returned a wrong result")

# Many calls and many resets: every reset must find its moment.
quick = torch.compile(lambda x, c: x.cos() + c[0], backend="eager", dynamic=False)
stop = threading.Event()
errors: list[str] = []


def calls(which: int) -> None:
    n = 0
    while not stop.is_set():
        n += 1
        x = torch.randn(2 + (n + which) % 5)
        try:
            if not torch.equal(quick(x, [1]), x.cos() + 1):
                errors.append("wrong result")
        except Exception as e:
            errors.append(harness.first_line(e)[:100])


callers = [harness.Worker(lambda i=i: calls(i)) for i in range(3)]
for _ in range(60):
    torch._dynamo.reset()
    threading.Event().wait(0.02)
stop.set()
for worker in callers:
    worker.finish()
faults += sorted(set(errors))
harness.verdict(faults)
