"""What a sign may say, and the plain text that is found in its regular expression."""

from __future__ import annotations

from typing import Any

import pytest

from torchcompat import Hazard, Sign
from torchcompat.sign import Frame, longest_literal


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("CURRENT_PATCHER is None", "CURRENT_PATCHER is None"),
        (r"torch\.compile with fullgraph=True", "torch.compile with fullgraph=True"),
        (r"^AssertionError:?$", "AssertionError"),
        (r"(?:one|other) tail", " tail"),
        (r"one|other", ""),
        (r"[abc]def[^]x]ghij", "ghij"),
        (r"abcd*ef", "abc"),
        (r"ab{2,3}cdef", "cdef"),
        (r"abc+def", "abc"),
        (r"\w+ is \d+ of", " is "),
        (r"a\\b", "a\\b"),
        ("", ""),
    ],
)
def test_longest_literal(pattern: str, literal: str) -> None:
    assert longest_literal(pattern) == literal


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "KeyError"}, "too general"),
        ({"text": "AssertionError|KeyError: a long text"}, "too general"),
        ({"text": "x", "raised_in": "eval_frame.py"}, "not of the form"),
        ({"text": "x", "frames": ("a.py:",)}, "not of the form"),
        ({"text": "x", "kind": "panic"}, "is not error, log or dump"),
        ({"text": "a long enough text", "kind": "log", "frames": ("a.py:f",)}, "no frames"),
        ({"text": "Fatal Python error: Aborted", "kind": "dump"}, "known by its frames"),
        ({"text": "x", "frames": ("a.py:f",), "beside": ("a.py:f",)}, "beside is for dumps"),
    ],
)
def test_a_sign_that_cannot_be_right(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sign(**fields)


def test_a_text_that_is_no_regular_expression_shows_when_it_is_used() -> None:
    sign = Sign(text="a long enough text (")
    with pytest.raises(ValueError, match="no regular expression"):
        sign.pattern  # noqa: B018


def test_frame() -> None:
    frame = Frame.parse("torch/a.py|<generated>*:f|g")
    assert frame.fits("/x/torch/a.py", "f")
    assert frame.fits("torch/a.py", "g")
    assert frame.fits("<generated>.3 from /x/b.py:6 in h", "f")
    assert not frame.fits("/x/mytorch/a.py", "f")
    assert not frame.fits("/x/torch/axpy", "f")
    assert not frame.fits("/x/torch/a.py", "ff")
    assert Frame.parse("a.py:*").fits("a.py", "anything")


def test_hazards_and_patches_check_their_signs(patch_of: Any, wrap: Any) -> None:
    sign = Sign(text="a long enough text")
    assert patch_of(wrap(), signs=(sign,)).signs == (sign,)
    with pytest.raises(ValueError, match="signs must be a tuple of Sign"):
        patch_of(wrap(), signs=[sign])
    with pytest.raises(ValueError, match="signs must be a tuple of Sign"):
        Hazard(id="h", title="t", advice="a", signs=("text",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hazard id"):
        Hazard(id="H H", title="t", advice="a", signs=())
    with pytest.raises(ValueError, match="must say something"):
        Hazard(id="h", title="t", advice="", signs=())
