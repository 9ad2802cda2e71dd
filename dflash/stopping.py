"""Where a text ends: stop strings, found whatever tokens they are spread over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.errors import GenerationError

__all__ = ["StopStrings"]

# UTF-8 spends up to four bytes on a character, and a token may be a single byte.
_TOKENS_PER_CHARACTER = 4


class StopStrings:
    """Looks for strings in the text of the newest tokens.

    Raises GenerationError for an empty string, and without a tokenizer to make text with.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise GenerationError(f"stop is the text {stops!r}; give a list of texts")
        if "" in stops:
            raise GenerationError("stop holds an empty text, which every text contains")
        if stops and tokenizer is None:
            raise GenerationError("stop needs text, and this target has no tokenizer")
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._behind = _TOKENS_PER_CHARACTER * max(map(len, self._stops), default=0)

    def find(self, ids: Sequence[int], new: int) -> tuple[int, str] | None:
        """``(tokens, stop)`` of the first end that the last ``new`` of ``ids`` bring, or None.

        So many tokens are needed for the stop to be complete: what decoding one token at a time
        would have kept.
        """
        if not self._stops or self._first(ids[-(new + self._behind) :]) is None:
            return None
        for length in range(len(ids) - new + 1, len(ids) + 1):
            if (found := self._first(ids[:length])) is not None:
                return length, found[1]
        return None

    def text(self, ids: Sequence[int]) -> str | None:
        """The text up to the first stop, special tokens left out; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        whole = self._decoded(ids)
        found = self._first_in(whole)
        return whole if found is None else whole[: found[0]]

    def _first(self, ids: Sequence[int]) -> tuple[int, str] | None:
        return self._first_in(self._decoded(ids))

    def _first_in(self, text: str) -> tuple[int, str] | None:
        places = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(places, default=None)

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
