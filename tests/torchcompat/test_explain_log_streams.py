"""Tracebacks out of what real logs do to them: prefixes, interleaving, colours, cuts, bad bytes."""

from __future__ import annotations

import pytest

from torchcompat.logs.lines import read_line
from torchcompat.logs.read import Findings, LogReader
from torchcompat.logs.signs import Known
from torchcompat.logs.streams import Assembler, Event
from torchcompat.sign import Sign

FRAMES = [
    "Traceback (most recent call last):",
    '  File "/app/run.py", line 3, in main',
    "    step()",
    '  File "/venv/lib/torch/fx/tracer.py", line 10, in enter',
    "    assert patcher is not None",
    "           ^^^^^^^^^^^^^^^^^^^",
]
BARE = [*FRAMES, "AssertionError"]
KNOWN = {
    "bare": Known(
        "bare",
        "t",
        (
            Sign(
                text=r"^AssertionError:?$",
                raised_in="torch/fx/tracer.py:enter",
                source="patcher is not",
            ),
        ),
    ),
    "text": Known("text", "t", (Sign(text="the flag of another thread is set"),)),
    "deliberate": Known(
        "deliberate",
        "t",
        (Sign(text="this has been refused outright", absent=("torch/fx/tracer.py:trace",)),),
    ),
    "threaded": Known(
        "threaded", "t", (Sign(text="something about a thread", in_thread=True, sure=False),)
    ),
    "limit": Known(
        "limit", "t", (Sign(text=r"hit the limit \(8\)(?s:.)*reason: twins", kind="log"),)
    ),
    "context": Known(
        "context", "t", (Sign(text="a generic complaint here", elsewhere="torch/_dynamo/"),)
    ),
    "crash": Known(
        "crash",
        "t",
        (
            Sign(
                text="^Fatal Python error",
                kind="dump",
                frames=("dynamo/__init__.py:reset",),
                beside=("dynamo/eval_frame.py:wrapper",),
            ),
        ),
    ),
}


def read(lines: list[str] | bytes) -> Findings:
    reader = LogReader(KNOWN)
    reader.feed(lines if isinstance(lines, bytes) else "".join(f"{x}\n" for x in lines).encode())
    return reader.findings()


def counts(found: Findings) -> dict[str, int]:
    return {name: tally.count for name, tally in found.hazards.items()}


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("", ""),
        ("[rank3]: ", "rank3"),
        ("[3]: ", "3"),
        ("[default3]:", "default3"),
        ("[1,3]<stderr>:", "1,3"),
        ("(Worker pid=12) ", "Worker pid=12"),
        ("(RayWorkerWrapper pid=99, ip=10.0.0.4) ", "RayWorkerWrapper pid=99, ip=10.0.0.4"),
        ("\x1b[36m(Worker pid=12)\x1b[0m ", "Worker pid=12"),
        ("0: ", "0"),
        ("rank 3: ", "rank 3"),
        ("worker-1  | ", "worker-1"),
        ("2026-11-30 14:02:07,101 ", ""),
        ("2026-11-30T14:02:07.101Z stderr F ", ""),
        ("(EngineCore_0 pid=7) ERROR 11-30 14:02:07 [core.py:700] ", "EngineCore_0 pid=7"),
        ("[rank1]: W1130 14:02:07.101000 7031 torch/x.py:1994] [0/8] ", "rank1"),
        ("my own prefix 17> ", ""),
    ],
)
def test_prefixes(prefix: str, who: str) -> None:
    found = read([f"{prefix}hello", *[prefix + line for line in BARE], f"{prefix}bye"])
    assert counts(found) == {"bare": 1}
    tally = found.hazards["bare"]
    assert (tally.who, tally.number, tally.sure) == (who, 2, True)
    assert found.unknown == []


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_interleaved_ranks_do_not_mix(ending: str) -> None:
    """Rank 1 has the frames, rank 0 the bare error: neither has both."""
    other = ["Traceback (most recent call last):", '  File "/app/x.py", line 1, in f', "    1 / 0"]
    one = [f"[rank0]: {line}" for line in [*other, "AssertionError"]]
    two = [f"[rank1]: {line}" for line in [*FRAMES, "ZeroDivisionError: division by zero"]]
    mixed = [line for pair in zip(one, two, strict=False) for line in pair] + two[len(one) :]
    found = read(ending.join([*mixed, ""]).encode())
    assert found.hazards == {}
    assert [t.message for t in found.unknown] == [
        "AssertionError (raised by f in /app/x.py)",
        "ZeroDivisionError: division by zero",
    ]
    assert [t.who for t in found.unknown] == ["rank0", "rank1"]


def test_many_ranks_are_counted_together() -> None:
    lines = [f"[rank{rank}]: {line}" for line in BARE for rank in range(8)]
    found = read(lines)
    assert counts(found) == {"bare": 8}
    assert set(found.hazards["bare"].streams) == {f"rank{rank}" for rank in range(8)}


def test_a_logger_names_the_thread_and_python_does() -> None:
    found = read(["2026-11-30 14:02:07 ERROR [drafter-1] step failed", *BARE])
    assert found.hazards["bare"].thread == "drafter-1"
    found = read(["Exception in thread Thread-3 (loop):", *BARE])
    assert found.hazards["bare"].thread == "Thread-3"
    found = read(["2026-11-30 14:02:07 ERROR Thread-4 step failed", *BARE])
    assert found.hazards["bare"].thread == "Thread-4"


def test_in_thread_by_frames_or_by_name() -> None:
    error = "RuntimeError: something about a thread"
    start = '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner'
    assert read([FRAMES[0], start, error]).hazards.keys() == {"threaded"}
    assert read(["Exception in thread T:", FRAMES[0], error]).hazards.keys() == {"threaded"}
    assert read([*FRAMES, error]).hazards == {}
    assert read([error]).hazards == {}  # a line alone does not tell the thread


def test_a_known_message_outside_a_traceback() -> None:
    found = read(["12:00:01 ERROR drafter died: the flag of another thread is set", "go on"])
    assert counts(found) == {"text": 1}
    assert found.unknown == []


def test_a_source_line_with_the_message_counts_once() -> None:
    raises = '    raise RuntimeError("the flag of another thread is set")'
    found = read([*FRAMES[:2], raises, "RuntimeError: the flag of another thread is set"])
    assert counts(found) == {"text": 1}


def test_what_must_be_absent_and_what_is_cut_off() -> None:
    error = "RuntimeError: this has been refused outright"
    tracing = '  File "/venv/lib/torch/fx/tracer.py", line 5, in trace'
    assert read([*FRAMES, error]).hazards["deliberate"].sure
    assert read([FRAMES[0], tracing, error]).hazards == {}
    assert not read([*FRAMES[1:], error]).hazards["deliberate"].sure
    assert not read([error]).hazards["deliberate"].sure


def test_truncated() -> None:
    assert counts(read(BARE[3:])) == {"bare": 1}  # without its head
    cut = read(BARE[:4])
    assert cut.hazards == {}
    assert "a traceback that ends before its exception; its last frame is enter in" in (
        cut.unknown[0].message
    )
    assert read(["AssertionError"]).unknown == []
    stack = ["INFO compiled from", *FRAMES[1:5], "INFO next"]
    assert read(stack).unknown == []  # a stack of no exception


def test_a_frame_elsewhere_is_not_the_innermost() -> None:
    deeper = '  File "/app/callback.py", line 5, in check'
    found = read([*FRAMES, deeper, "    assert x", "AssertionError"])
    assert found.hazards == {}
    other_line = [*FRAMES[:4], "    assert name", "AssertionError"]
    assert read(other_line).hazards == {}  # the same function, another assertion


def test_chains_are_one_failure() -> None:
    during = "During handling of the above exception, another exception occurred:"
    cause = "The above exception was the direct cause of the following exception:"
    for joint in (during, cause):
        found = read([*BARE, "", joint, "", *FRAMES[:3], "RuntimeError: worker 3 failed"])
        assert counts(found) == {"bare": 1}
        assert found.unknown == []
    found = read([*BARE, "", *FRAMES[:3], "RuntimeError: worker 3 failed"])
    assert counts(found) == {"bare": 1}
    assert [t.message for t in found.unknown] == ["RuntimeError: worker 3 failed"]


def test_an_error_carried_from_a_replica() -> None:
    caught = "RuntimeError: Caught AssertionError in replica 1 on device 1."
    found = read([*FRAMES[:3], caught, "Original Traceback (most recent call last):", *BARE[1:]])
    assert counts(found) == {"bare": 1}
    assert found.unknown == []


def test_exception_group() -> None:
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/app/run.py", line 9, in main',
        "  |     raise group",
        "  | ExceptionGroup: drafters (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------",
        *[f"    | {line}" for line in BARE],
        "    +---------------- 2 ----------------",
        *[f"    | {line}" for line in [*FRAMES[:3], "ValueError: bad batch"]],
        "    +------------------------------------",
    ]
    assert counts(read(lines)) == {"bare": 1}


def test_colours_progress_bars_and_bad_bytes() -> None:
    coloured = [f"\x1b[31m{line}\x1b[0m" for line in BARE]
    assert counts(read(coloured)) == {"bare": 1}
    bar = ["Epoch 1:  10%|#    | 1/10\rEpoch 1:  20%|##   | 2/10" + BARE[0], *BARE[1:]]
    assert counts(read(bar)) == {"bare": 1}
    raw = b"\xff\xfe\x80 caf\xe9\n" + "\n".join(BARE).replace("step()", "st\udc80p()").encode(
        "utf-8", "surrogateescape"
    )
    assert counts(read(raw)) == {"bare": 1}


def test_a_record_of_several_lines() -> None:
    head = "W1203 11:49:43.381000 7031 torch/_dynamo/convert_frame.py:1994] [0/8] "
    record = [head + "hit the limit (8)", head + "   function: 'f'", head + "   reason: twins"]
    assert counts(read([*record, head + "To log all reasons"])) == {"limit": 1}
    assert read([*record[:2], head + "   reason: other shapes"]).hazards == {}
    after = [*FRAMES[:3], "ValueError: x", *record]  # right behind an error
    assert counts(read(after)) == {"limit": 1}
    ranks = [f"[rank{rank}]:{line}" for line in record for rank in (0, 1)]
    assert counts(read(ranks)) == {"limit": 2}


def test_what_must_be_elsewhere_in_the_log() -> None:
    error = [*FRAMES[:3], "RuntimeError: a generic complaint here"]
    assert read(error).hazards == {}
    assert len(read(error).unknown) == 1
    assert counts(read([*error, "12:00:00 torch/_dynamo/x.py"])) == {"context": 1}
    assert counts(read(["torch/_dynamo/x.py", *error])) == {"context": 1}
    assert read(["a generic complaint here"]).unknown == []  # a line is no failure by itself


RESET = '  File "/venv/torch/dynamo/__init__.py", line 153 in reset'
CALL = '  File "/venv/torch/dynamo/eval_frame.py", line 9 in wrapper'


def test_dumps() -> None:
    head = ["Fatal Python error: Segmentation fault", ""]
    current = "Current thread 0x00007f8bf99676c0 (most recent call first):"
    other = "Thread 0x00007f8bf91666c0 [Thread-2] (most recent call first):"
    dump = [*head, current, CALL, "", other, RESET, "", "Extension modules: numpy (total: 1)"]
    assert counts(read(dump)) == {"crash": 1}
    assert read([*head, current, CALL, RESET]).hazards == {}  # one thread is not two
    unknown = read([*head, current, CALL])
    assert [t.message for t in unknown.unknown] == ["Fatal Python error: Segmentation fault"]
    hang = read(["Timeout (0:05:00)!", other, CALL])
    assert hang.hazards == {}
    assert [t.message for t in hang.unknown] == ["Timeout (0:05:00)!"]
    py_spy = [
        *head,
        'Thread 7 (active): "MainThread"',
        "    wrapper (torch/dynamo/eval_frame.py:9)",
    ]
    py_spy += ['Thread 8 (idle): "T"', "    reset (torch/dynamo/__init__.py:153)"]
    assert counts(read(py_spy)) == {"crash": 1}


def test_repeats_of_an_unknown_failure_are_one_kind() -> None:
    lines = []
    for step in range(5):
        lines += [*FRAMES[:3], f"ValueError: bad batch {step} at 0x{step}f"]
    found = read(lines)
    assert [(t.count, t.number) for t in found.unknown] == [(5, 1)]


def test_nothing_is_kept_without_bound() -> None:
    """Hundreds of ranks that never end their traceback, thousands of kinds of failures."""
    events: list[Event] = []
    assembler = Assembler(events.append)
    for rank in range(3000):
        assembler.feed(read_line(2 * rank, f"[rank{rank}]: {FRAMES[0]}".encode()))
    assert len(assembler._open) <= 512
    assembler.end()
    assert len(events) == 3000
    found = read([x for n in range(400) for x in (*FRAMES[:3], f"Error{'x' * n}Error: y")])
    assert len(found.unknown) + found.more_unknown == 400
    assert len(found.unknown) == 200


def test_silent_streams_end() -> None:
    lines = [f"[rank0]: {line}" for line in BARE]
    reader = LogReader(KNOWN)
    reader.feed("".join(f"{x}\n" for x in lines).encode())
    reader.feed(b"[rank1]: step\n" * 12000)
    assert not reader._assembler.is_open
    assert counts(reader.findings()) == {"bare": 1}


def test_blocks_cut_anywhere_give_the_same() -> None:
    lines = [f"[rank{rank}]: {line}" for line in BARE for rank in range(3)]
    whole = read(lines)
    for size in (1, 2, 5):
        reader = LogReader(KNOWN)
        for start in range(0, len(lines), size):
            reader.feed("".join(f"{x}\n" for x in lines[start : start + size]).encode())
        found = reader.findings()
        assert counts(found) == counts(whole)
        assert found.lines == whole.lines == len(lines)


def test_a_line_taken_apart() -> None:
    line = read_line(7, b"[rank3]: 2026-11-30 14:02:07,101 ERROR [drafter-1] x: y\r\n")
    assert (line.number, line.who, line.thread, line.text) == (7, "rank3", "drafter-1", "x: y")
    assert line.dated
    plain = read_line(1, b'  File "/a.py", line 3, in f')
    assert (plain.who, plain.text, plain.dated) == ("", '  File "/a.py", line 3, in f', False)
