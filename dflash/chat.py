"""Conversations as tokens, with the mask of what the target itself would write.

The text is rendered whole by the target's chat template, cut at the ends of the assistant's turns
and made into tokens piece by piece: that is how a server makes it, which tokenises the prompt alone
and appends what the model writes. A turn's end token is part of the turn (the drafter has to learn
to stop); what follows it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.errors import DataError

__all__ = [
    "Example",
    "encode_conversation",
    "encode_prompt",
    "encode_text",
    "encode_text_prompt",
    "with_response",
]

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Example:
    """A training sequence; `loss_mask[i]`: token i is the target's own."""

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    origin: str

    @property
    def anchors(self) -> int:
        """Positions at which a block can start (see anchors.valid_anchors)."""
        return sum(a and b for a, b in zip(self.loss_mask, self.loss_mask[1:], strict=False))

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        return Example(self.ids[:length], self.loss_mask[:length], self.origin)


def encode_prompt(
    tokenizer: Any, messages: Messages, origin: str, tools: Sequence[Any] = ()
) -> list[int]:
    """The tokens after which the target writes its next turn.

    Raises DataError where the template refuses the messages.
    """
    return _tokens(tokenizer, _rendered(tokenizer, messages, origin, tools, prompt=True))


def with_response(
    tokenizer: Any,
    messages: Messages,
    stop_ids: Collection[int],
    response: Sequence[int],
    origin: str,
    tools: Sequence[Any] = (),
) -> Example:
    """The sequence of a prompt and the tokens that the target wrote after it; earlier answers in
    `messages` are supervised as well."""
    pieces = _pieces(tokenizer, messages, origin, tools, prompt=True)
    return _example(tokenizer, pieces, stop_ids, origin, response)


def encode_conversation(
    tokenizer: Any,
    messages: Messages,
    stop_ids: Collection[int],
    origin: str,
    tools: Sequence[Any] = (),
) -> Example:
    """The sequence of a conversation that ends with the assistant, up to the end of that turn.

    Turns that the template renders otherwise once more follows (thoughts that it drops) are not
    supervised. Raises DataError where the template refuses the messages, or where it hides even
    the last turn.
    """
    pieces = _pieces(tokenizer, messages, origin, tools, prompt=False)
    return _example(tokenizer, pieces, stop_ids, origin)


def encode_text(
    tokenizer: Any, text: str, marker: str, stop_ids: Collection[int], origin: str
) -> Example:
    """The sequence of a text that is rendered already.

    The loss is over all of it; with a `marker`, over what follows each place of it up to and with
    the first end token. A begin-of-text token that the tokenizer adds to a text is put in front
    unless the text has it. Raises DataError for a text without the marker.
    """
    begin = _begin(tokenizer, text)
    head, *answers = text.split(marker) if marker else ("", text)
    if not answers:
        raise DataError(f"{origin}: the text has no {marker!r} (data.marker)", kind="no marker")
    ids = [*begin, *_tokens(tokenizer, head + marker)]
    mask = [False] * len(ids)
    for number, answer in enumerate(answers):
        more = number < len(answers) - 1
        tokens = _tokens(tokenizer, answer)
        ends = [i for i, token in enumerate(tokens) if token in stop_ids]
        length = ends[0] + 1 if marker and ends else len(tokens)
        ids += tokens
        mask += [i < length for i in range(len(tokens))]
        if more:
            again = _tokens(tokenizer, marker)
            ids += again
            mask += [False] * len(again)
    end = len(mask) - mask[::-1].index(True) if True in mask else 0
    return Example(tuple(ids[:end]), tuple(mask[:end]), origin)


def encode_text_prompt(tokenizer: Any, text: str, marker: str) -> list[int] | None:
    """The tokens up to the last answer of such a text; None where no marker says where it is."""
    if not marker or marker not in text:
        return None
    return [*_begin(tokenizer, text), *_tokens(tokenizer, text[: text.rindex(marker)] + marker)]


def _begin(tokenizer: Any, text: str) -> list[int]:
    bos, bos_text = tokenizer.bos_token_id, tokenizer.bos_token
    adds = bos is not None and bos in tokenizer("")["input_ids"]
    return [bos] if adds and not text.startswith(bos_text) else []


def _pieces(
    tokenizer: Any, messages: Messages, origin: str, tools: Sequence[Any], *, prompt: bool
) -> list[tuple[str, bool]]:
    """(text, whether the assistant's) from the start to the end."""
    whole = _rendered(tokenizer, messages, origin, tools, prompt=prompt)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _rendered(tokenizer, messages[:number], origin, tools, prompt=True)
        last = number == len(messages) - 1
        after = whole if last else _rendered(tokenizer, messages[: number + 1], origin, tools)
        if not (whole.startswith(before) and whole.startswith(after) and len(before) >= done):
            if last:
                raise DataError(
                    f"{origin}: the target's chat template does not render the last answer after "
                    "the prompt that it would be generated from; use data.responses=always",
                    kind="answer not rendered after its prompt",
                )
            continue
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*pieces, (whole[done:], False)]


def _example(
    tokenizer: Any,
    pieces: Sequence[tuple[str, bool]],
    stop_ids: Collection[int],
    origin: str,
    response: Sequence[int] = (),
) -> Example:
    ids: list[int] = []
    mask: list[bool] = []
    for text, answered in pieces:
        tokens = _tokens(tokenizer, text)
        ids += tokens
        mask += _turn_mask(tokens, stop_ids) if answered else [False] * len(tokens)
    ids += response
    mask += [True] * len(response)
    end = len(mask) - mask[::-1].index(True) if True in mask else 0  # nothing to learn behind it
    return Example(tuple(ids[:end]), tuple(mask[:end]), origin)


def _turn_mask(tokens: Sequence[int], stop_ids: Collection[int]) -> list[bool]:
    """True up to and with the turn's last end token; all of it where there is none."""
    ends = [i for i, token in enumerate(tokens) if token in stop_ids]
    length = ends[-1] + 1 if ends else len(tokens)
    return [i < length for i in range(len(tokens))]


def _rendered(
    tokenizer: Any, messages: Messages, origin: str, tools: Sequence[Any], *, prompt: bool = False
) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        return _plain(tokenizer, messages, origin, prompt=prompt)
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise DataError(
            f"{origin}: the target's chat template refuses it: {error}",
            kind="refused by the chat template",
        ) from error
    assert isinstance(text, str)
    return text


def _plain(tokenizer: Any, messages: Messages, origin: str, *, prompt: bool) -> str:
    """A base model's text: prompt, answer, end."""
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["user", "assistant"]):
        raise DataError(
            f"{origin}: the target has no chat template, so a conversation is one prompt and at "
            f"most one answer; this one is {', '.join(roles) or 'empty'}",
            kind="refused by the chat template",
        )
    begin = getattr(tokenizer, "bos_token", None) or ""
    text = begin + "".join(str(message["content"]) for message in messages)
    ended = text if prompt or len(roles) == 1 else text + (tokenizer.eos_token or "")
    return ended


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
