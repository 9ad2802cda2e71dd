from __future__ import annotations

import io
import re
import threading

from dflash.progress import PhaseTimer, ProgressBar, duration, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_durations():
    assert [duration(s) for s in (0, 7.4, 59.6, 750, 3723)] == [
        "0:00",
        "0:07",
        "1:00",
        "12:30",
        "1:02:03",
    ]


def test_bar_in_a_file_is_whole_lines():
    out = io.StringIO()
    with ProgressBar("responses", 4, "prompts", stream=out, every=0.0) as bar:
        bar.advance()
        bar.advance(3)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("responses [######..................] 1/4 prompts, ")
    assert "left" in lines[0]
    assert "4/4 prompts" in lines[-1]
    assert "took 0:00" in lines[-1]
    assert "\r" not in out.getvalue()


def test_bar_on_a_terminal_redraws_one_line():
    out = Terminal()
    with ProgressBar("features", 2, "groups", stream=out) as bar:
        bar.advance(2)
    assert out.getvalue().startswith("\rfeatures [")
    assert out.getvalue().count("\n") == 1


def test_bar_shows_its_state_even_if_the_stage_fails():
    out = io.StringIO()
    try:
        with ProgressBar("x", 10, "y", stream=out) as bar:
            bar.advance(3)
            raise OSError
    except OSError:
        pass
    assert "3/10 y" in out.getvalue()


def test_bar_counts_from_many_threads():
    out = io.StringIO()
    with ProgressBar("x", 4000, "y", stream=out) as bar:
        threads = [
            threading.Thread(target=lambda: [bar.advance() for _ in range(1000)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert "4000/4000 y" in out.getvalue()


def test_phase_timer_sums_by_name_in_order():
    timer = PhaseTimer()
    with timer.phase("load"):
        pass
    timer.add("train", 90.0)
    timer.add("train", 30.0)
    rows = timer.rows()
    assert [name for name, _ in rows] == ["load", "train", "together"]
    assert re.fullmatch(r"2:00  100 %", rows[1][1])
    assert rows[2][1] == "2:00"


def test_table_is_aligned():
    text = table("result", [("a", "1"), ("long name", "2"), ("empty", "")])
    assert text == "result\n  a          1\n  long name  2\n  empty"
