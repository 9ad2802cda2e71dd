from __future__ import annotations

import json

import pytest

from dflash.data import Conversation, Rejects, parse_line, read_jsonl, split
from dflash.errors import ConfigError, DataError


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
    found = parse_line(json.dumps(record), "f.jsonl", 7)
    assert roles(found) == expected
    assert found.answered is answered
    assert found.origin == "f.jsonl:7"
    assert found.prompt == (found.messages[:-1] if answered else found.messages)


def test_other_keys_of_a_message_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    record = {"messages": [{"role": "user", "content": "a"}, call]}
    message = parse_line(json.dumps(record), "f", 1).messages[1]
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no valid JSON"),
        ("[1]", "a JSON list, not an object"),
        ("{}", "it has neither messages nor prompt (its keys: none)"),
        ('{"text": "x"}', "its keys: text"),
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
def test_a_bad_line_names_file_line_and_problem(line, problem):
    with pytest.raises(DataError) as caught:
        parse_line(line, "some.jsonl", 12)
    text = str(caught.value)
    assert text.startswith("some.jsonl:12: not a conversation: ")
    assert problem in text
    assert (str(caught.value.path), caught.value.line) == ("some.jsonl", 12)


def test_files_are_read_to_the_first_bad_line_or_around_it(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "a"}\n\nnope\n{"prompt": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:3"):
        read_jsonl(path, Rejects("error"))
    rejects = Rejects("skip")
    found = read_jsonl(path, rejects)
    assert [c.messages[0]["content"] for c in found] == ["a", "b", "c"]
    assert [(p.path, p.line, p.kind) for p in rejects.problems] == [(path, 3, "not a conversation")]
    assert len(read_jsonl(path, Rejects("error"), limit=1)) == 1  # the bad line is behind the limit
    assert [c.origin for c in found] == [f"{path}:{n}" for n in (1, 4, 5)]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="there is no data file"):
        read_jsonl(tmp_path / "none.jsonl", Rejects("error"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no conversation"):
        read_jsonl(tmp_path / "empty.jsonl", Rejects("error"))
    (tmp_path / "binary.jsonl").write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read_jsonl(tmp_path / "binary.jsonl", Rejects("error"))


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
