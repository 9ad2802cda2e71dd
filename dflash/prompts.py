"""Prompts in any of their forms, as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dflash.chat import encode_prompt
from dflash.errors import GenerationError

__all__ = ["Prompt", "prompt_tokens"]

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"


def prompt_tokens(tokenizer: Any, prompt: Prompt, number: int, *, thinking: bool) -> list[int]:
    """The tokens of a prompt: ids as they are, a text's tokens, or rendered messages.

    ``thinking`` is handed to the chat template as ``enable_thinking``, which templates of models
    without it leave unread. Raises GenerationError, with the prompt's ``number``, for a prompt
    without any token, and DataError where the template refuses the messages.
    """
    if not isinstance(prompt, str) and all(isinstance(part, int) for part in prompt):
        ids = [part for part in prompt if isinstance(part, int)]
    elif tokenizer is None:
        raise GenerationError(f"prompt {number} is text, and this target has no tokenizer")
    elif isinstance(prompt, str):
        ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
    else:
        ids = _rendered(tokenizer, prompt, number, thinking)
    if not ids:
        raise GenerationError(f"prompt {number} is empty; decoding needs at least one token")
    return ids


def _rendered(tokenizer: Any, messages: Any, number: int, thinking: bool) -> list[int]:
    if not all(isinstance(message, Mapping) for message in messages):
        raise GenerationError(
            f"prompt {number} is neither a text, nor token ids, nor messages with role and content"
        )
    return encode_prompt(_Template(tokenizer, thinking), messages, f"prompt {number}")


class _Template:
    """A tokenizer whose chat template hears whether to think."""

    def __init__(self, tokenizer: Any, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, enable_thinking=self._thinking, **options
        )

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
