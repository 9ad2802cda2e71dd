from __future__ import annotations

import json
import sys

import pytest

from dflash import tasks as tasks_module
from dflash.errors import ConfigError, DataError
from dflash.tasks import load_task

ROWS = {
    "gsm8k": {"question": "2 + 2?", "answer": "4"},
    "math500": {"problem": "2 + 2?"},
    "mbpp": {"prompt": "Add."},
    "humaneval": {"prompt": "def add(a, b):"},
    "mt-bench": {"prompt": ["Hello.", "And now?"]},
}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_data_sets_own_rows(tmp_path, name):
    (sample,) = load_task(name, jsonl(tmp_path / "x.jsonl", [ROWS[name]]), 0)
    sum_text = "2 + 2?\nPlease reason step by step, and put your final answer within \\boxed{}."
    text = {
        "gsm8k": sum_text,
        "math500": sum_text,
        "mbpp": "Add.",
        "humaneval": "Write a solution to the following problem and make sure that it passes the "
        "tests:\n```python\ndef add(a, b):\n```",
        "mt-bench": "Hello.",
    }[name]
    assert sample.turns[0] == text
    assert len(sample.turns) == (2 if name == "mt-bench" else 1)


def test_cached_turns_and_the_drawing(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", [{"turns": [f"w{i}"]} for i in range(40)])
    every = load_task("gsm8k", file, 0)
    assert [sample.turns[0] for sample in every] == [f"w{i}" for i in range(40)]
    drawn = load_task("gsm8k", file, 5)
    assert drawn == load_task("gsm8k", file, 5)
    assert len(set(drawn)) == 5
    assert set(drawn) < set(every)


def test_ones_own_file_keeps_the_history(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (sample,) = load_task("own", jsonl(tmp_path / "x.jsonl", [{"messages": messages}]), 0)
    assert sample.turns == ("c",)
    assert list(sample.history) == messages[:3]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"answer": "4"}], "x.jsonl:1: has no entry 'question'"),
        ([{"turns": []}], "its turns are not a list of texts"),
        ([], "holds no problem of gsm8k"),
        ([3], "a JSON int, not an object"),
    ],
)
def test_bad_files(tmp_path, rows, text):
    with pytest.raises(DataError, match=text):
        load_task("gsm8k", jsonl(tmp_path / "x.jsonl", rows), 0)


def test_what_cannot_be_had_names_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no task .gsm9k.: humaneval, gsm8k"):
        load_task("gsm9k", None, 0)
    with pytest.raises(DataError, match="cannot be read"):
        load_task("gsm8k", tmp_path / "nothing.jsonl", 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install datasets.*--data gsm8k=FILE"):
        load_task("gsm8k", None, 0)


def test_humaneval_and_the_hub(monkeypatch):
    monkeypatch.setattr(tasks_module, "humaneval_prompts", lambda: ["def f():"])
    assert "def f():" in load_task("humaneval", None, 0)[0].turns[0]

    class Hub:
        @staticmethod
        def load_dataset(*names, split):
            if names[0] != "openai/gsm8k":
                raise OSError("offline")
            assert (names, split) == (("openai/gsm8k", "main"), "test")
            return [{"question": "q"}]

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert load_task("gsm8k", None, 0)[0].turns[0].startswith("q\n")
    with pytest.raises(DataError, match=r"cannot be loaded .offline.; name a file"):
        load_task("mbpp", None, 0)
