"""Tokens as a reader sees them: each one's own text, and which of them the loss is about."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from dflash.chat import Example

__all__ = ["coloured", "marked", "token_texts"]

# Tokens before the one in question that a decoder may need to space it as it does in a text, and
# tokens that one character can be spread over in UTF-8.
_CONTEXT = 4
_CHARACTER = 4

# Two shades for neighbours, so that tokens are told apart without a separator.
_LEARNED = ("\x1b[30;42m", "\x1b[30;102m")
_CONTEXT_SHADES = ("\x1b[2m", "\x1b[22m")
_RESET = "\x1b[0m"

# Between tokens in the plain form: hardly ever part of a text.
_BETWEEN = "¦"


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; "" for one that only begins a character."""
    texts: list[str] = []
    whole = 0  # tokens whose characters are complete
    for index in range(len(ids)):
        start = max(0, whole - _CONTEXT)
        before = _decoded(tokenizer, ids[start:whole])
        text = _decoded(tokenizer, ids[start : index + 1])
        if text.endswith("\ufffd") and index - whole < _CHARACTER - 1 and index + 1 < len(ids):
            texts.append("")
            continue
        fits = text.startswith(before)
        texts.append(text[len(before) :] if fits else _decoded(tokenizer, ids[whole : index + 1]))
        whole = index + 1
    return texts


def coloured(tokenizer: Any, example: Example) -> str:
    """For a terminal: tokens of the loss on green, the others faint, neighbours in two shades."""
    parts = []
    for index, (text, learned) in enumerate(_pairs(tokenizer, example)):
        shade = (_LEARNED if learned else _CONTEXT_SHADES)[index % 2]
        # A line's end shows as a sign, or the colour would run to the edge of the screen.
        parts.append(f"{shade}{text.replace(chr(10), '⏎' + _RESET + chr(10) + shade)}{_RESET}")
    return "".join(parts)


def marked(tokenizer: Any, example: Example) -> str:
    """Without colours: a line per run of tokens, `+` before those of the loss."""
    lines = []
    runs = itertools.groupby(_pairs(tokenizer, example), key=lambda pair: pair[1])
    for learned, run in runs:
        shown = _BETWEEN.join(text.replace("\n", "\\n") for text, _ in run)
        lines.append(f"{'+' if learned else ' '} {shown}")
    return "\n".join(lines)


def _pairs(tokenizer: Any, example: Example) -> list[tuple[str, bool]]:
    return list(zip(token_texts(tokenizer, example.ids), example.loss_mask, strict=True))


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text
