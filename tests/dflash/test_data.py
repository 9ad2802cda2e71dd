from __future__ import annotations

import json
import sys
import types

import pytest

from dflash.config import DataSettings
from dflash.data import Conversation, Form, Rejects, read_data, split
from dflash.errors import ConfigError, DataError


def read(source, rejects=None, seed=0, **settings):
    return read_data(
        DataSettings(source=str(source), **settings), seed, rejects or Rejects("error")
    )


def parse(record, path="f", number=1, **form):
    return Form(**form).conversation(record, path, number)


def roles(conversation):
    return [message["role"] for message in conversation.messages]


@pytest.mark.parametrize(
    ("record", "expected", "answered"),
    [
        ({"prompt": "a"}, ["user"], False),
        ({"prompt": "a", "response": None}, ["user"], False),
        ({"prompt": "a", "response": "b"}, ["user", "assistant"], True),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            ["system", "user"],
            False,
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ["user", "assistant"],
            True,
        ),
    ],
)
def test_forms_of_a_line(record, expected, answered):
    found = parse(record, "f.jsonl", 7)
    assert roles(found) == expected
    assert found.answered is answered
    assert found.origin == "f.jsonl:7"
    assert found.prompt == (found.messages[:-1] if answered else found.messages)


def test_other_keys_of_a_message_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    record = {"messages": [{"role": "user", "content": "a"}, call]}
    message = parse(record).messages[1]
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no valid JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "it has neither messages, prompt nor text (its keys: none)"),
        ('{"body": "x"}', "its keys: body"),
        ('{"text": 3}', "the text is int, not text"),
        ('{"prompt": "x", "tools": 3}', "its tools are int"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "a part that is no text (image_url)",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "tool_calls": 3}]}',
            "the tool_calls of message 2 are no list",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": '
            '[{"name": "f", "arguments": "{"}]}]}',
            "arguments of a tool call of message 2 are no JSON",
        ),
        (
            '{"conversations": [{"from": "human", "value": "a"}, '
            '{"from": "function_call", "value": "f()"}]}',
            "no JSON with name and arguments",
        ),
        ('{"messages": []}', "not a list with at least one message"),
        ('{"messages": "hi"}', "not a list"),
        ('{"messages": ["hi"]}', "message 1 is str, not an object"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "message 1 has the role 'robot'"),
        ('{"messages": [{"role": "user"}]}', "the content of message 1 is NoneType, not text"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no message of the user"),
        ('{"prompt": 3}', "the prompt is int, not text"),
        ('{"prompt": "  "}', "the prompt is empty"),
        (
            json.dumps({"messages": [{"role": r, "content": "x"} for r in ("assistant", "user")]}),
            "the assistant speaks before the user",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": ""}]}',
            "ends with a system message",
        ),
        (
            json.dumps(
                {"messages": [{"role": r, "content": "x"} for r in ("user", *["assistant"] * 2)]}
            ),
            "the assistant speaks twice",
        ),
    ],
)
def test_a_bad_line_names_file_line_and_problem(line, problem, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n" * 11 + line + "\n")
    with pytest.raises(DataError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:12: ")
    assert problem in text
    assert (caught.value.path, caught.value.line) == (path, 12)
    assert caught.value.kind in {"not a conversation", "no valid JSON", "not an object"}


def test_files_are_read_to_the_first_bad_line_or_around_it(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "a"}\n\nnope\n{"prompt": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:3"):
        read(path)
    rejects = Rejects("skip")
    found = read(path, rejects)
    assert [c.messages[0]["content"] for c in found] == ["a", "b", "c"]
    assert [(p.path, p.line, p.kind) for p in rejects.problems] == [(path, 3, "no valid JSON")]
    assert len(read(path, limit=1)) == 1  # the bad line is behind the limit
    assert [c.origin for c in found] == [f"{path}:{n}" for n in (1, 4, 5)]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="there is no data file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no conversation: it is empty"):
        read(tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n3\n")
    with pytest.raises(DataError, match=r"all 2 rows are bad, the first: .*bad.jsonl:1: not a"):
        read(tmp_path / "bad.jsonl", Rejects("skip"))
    (tmp_path / "array.jsonl").write_text('[{"prompt": "a"}]')
    with pytest.raises(DataError, match=r"array.jsonl:1: a JSON list.*jq -c '\.\[\]'"):
        read(tmp_path / "array.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"binary\.jsonl:1: not UTF-8 text: byte 13 of the line"):
        read(tmp_path / "binary.jsonl")


def test_one_bad_line_does_not_hide_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.sources._LONGEST_LINE", 30)
    path = tmp_path / "c.jsonl"
    long = b'{"prompt": "' + b"x" * 99 + b'"}\n'
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a"}\n' + long + b'{"prompt": "\xff"}\n{"prompt": "b"}\n'
        b'{"prompt": "a"}\n'
    )
    rejects = Rejects("skip")
    assert [c.messages[0]["content"] for c in read(path, rejects)] == ["a", "b"]
    assert [(p.line, p.kind) for p in rejects.problems] == [
        (2, "line too long"),
        (3, "not UTF-8"),
        (5, "duplicate"),
    ]
    assert f"the same conversation as {path}:1" in str(rejects.problems[2])
    assert len(read(path, Rejects("skip"), duplicates="keep")) == 3


def test_field_names_and_formats_are_settings(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"q": "a", "a": "b", "text": "t"}\n')
    found = read(path, fields="prompt=q, response=a")[0]
    assert [m["content"] for m in found.messages] == ["a", "b"]
    assert read(path, format="text")[0].text == "t"
    with pytest.raises(ConfigError, match=r"data\.fields has 'question=q'"):
        read(path, fields="question=q")
    with pytest.raises(DataError, match="the prompt is NoneType"):
        read(path, format="prompt")
    dialog = {"dialog": [{"who": "human", "says": "a"}, {"who": "gpt", "says": "b"}]}
    names = {"messages": "dialog", "role": "who", "content": "says"}
    assert roles(parse(dialog, names=names)) == ["user", "assistant"]


def test_tools_parts_and_calls_become_what_templates_take():
    record = {
        "system": "be short",
        "tools": '[{"name": "f"}]',
        "conversations": [
            {"from": "human", "value": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "3", "weight": None},
        ],
    }
    found = parse(record)
    assert roles(found) == ["system", "user", "assistant", "tool"]
    assert found.tools == ({"name": "f"},)
    assert found.messages[1]["content"] == "ab"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert found.messages[2]["tool_calls"] == [call]
    assert found.messages[3] == {"role": "tool", "content": "3"}
    text = {"function": {"name": "f", "arguments": '{"x": 1}'}, "type": "function"}
    entries = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [text]}]
    assert parse({"messages": entries}).messages[1]["tool_calls"] == [call]
    columns = {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}
    assert roles(parse(columns)) == ["user", "assistant"]


def test_several_files_are_mixed_by_the_seed_before_the_limit(tmp_path):
    for name in ("one", "two"):
        lines = (f'{{"prompt": "{name} {i}"}}\n' for i in range(20))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    both = f"{tmp_path / 'one.jsonl'}, {tmp_path / 'two.jsonl'}"
    in_order = read(both, order="source")
    mixed = read(both)
    assert mixed == read(both) != read(both, seed=1)
    assert read(tmp_path) == read(tmp_path / "*.jsonl") == mixed
    assert sorted(c.origin for c in mixed) == sorted(c.origin for c in in_order)
    first = {c.messages[0]["content"].split()[0] for c in read(both, limit=15)}
    assert first == {"one", "two"}
    assert read(both, limit=15, order="source") == in_order[:15]
    assert read(tmp_path / "one.jsonl") == in_order[:20]
    with pytest.raises(ConfigError, match="twice"):
        read(f"{both},{tmp_path / 'one.jsonl'}")
    with pytest.raises(DataError, match="no data file matches"):
        read(tmp_path / "*.json")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"data\.source is empty"):
        read(" , ")


@pytest.mark.parametrize(
    ("source", "package"), [("c.parquet", "pyarrow"), ("some/hub-set", "datasets")]
)
def test_a_missing_optional_package_is_named_with_the_way_out(
    source, package, tmp_path, monkeypatch
):
    for module in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=rf"{source} needs {package} .*torchcompat-dflash\[data\]"):
        read(source)


def test_parquet_rows_are_those_of_the_lines(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "c"}]},
        {"messages": []},
    ]
    path = tmp_path / "c.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    rejects = Rejects("skip")
    found = read(path, rejects)
    assert [roles(c) for c in found] == [["user", "assistant"], ["user"]]
    assert found[1].origin == f"{path}:2"
    assert [(p.path, p.line) for p in rejects.problems] == [(path, 3)]
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"c\.parquet: no Parquet file that can be read"):
        read(path)


def test_saved_data_sets_are_read_with_their_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": None}]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"dev": one}).save_to_disk(tmp_path / "dict")
    found = read(tmp_path / "one")
    assert [c.answered for c in found] == [True, False]
    assert found[1].origin == f"{tmp_path / 'one'}:2"
    assert len(read(tmp_path / "dict", split="dev")) == 2
    with pytest.raises(ConfigError, match=r"data\.split is 'train'; .*dict has dev"):
        read(tmp_path / "dict")


def test_a_hub_data_set_is_asked_for_by_name_and_subset(monkeypatch):
    asked = []

    def load(name, subset):
        asked.append((name, subset))
        if name == "no/such":
            raise FileNotFoundError("nothing at all\nmore")
        return {"train": [{"prompt": "a"}]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert read("some/hub-set", subset="en")[0].origin == "some/hub-set:1"
    assert asked == [("some/hub-set", "en")]
    with pytest.raises(DataError, match=r"no data file no/such, and .*: nothing at all$"):
        read("no/such")


def test_split_is_by_the_seed_and_keeps_the_order():
    conversations = [Conversation(({"role": "user", "content": str(i)},), str(i)) for i in range(9)]
    parts = split(conversations, 3, seed=5)
    assert parts == split(conversations, 3, seed=5) != split(conversations, 3, seed=6)
    assert sorted([*parts.train, *parts.held_out], key=lambda c: c.origin) == conversations
    for part in (parts.train, parts.held_out):
        assert list(part) == sorted(part, key=lambda c: c.origin)
    assert split(conversations, 0, seed=5).train == tuple(conversations)
    with pytest.raises(ConfigError, match=r"data\.held_out is 9 of 9"):
        split(conversations, 9, seed=5)
