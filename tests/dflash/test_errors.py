from __future__ import annotations

import pytest

from dflash import errors


def test_every_error_is_a_dflash_error():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.DFlashError)


@pytest.mark.parametrize(
    ("path", "line", "text"),
    [
        ("d/x.jsonl", 7, "d/x.jsonl:7: no messages"),
        ("d/x.jsonl", None, "d/x.jsonl: no messages"),
        (None, None, "no messages"),
    ],
)
def test_data_error_says_where(path, line, text):
    error = errors.DataError("no messages", path, line)
    assert str(error) == text
    assert error.line == line


def test_worker_failed_names_thread_and_cause():
    cause = ValueError("boom")
    error = errors.WorkerFailed("drafter-1", cause)
    assert error.cause is cause
    assert error.thread_name == "drafter-1"
    assert str(error) == "thread 'drafter-1' failed: ValueError: boom"
