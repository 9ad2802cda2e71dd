"""What training would see of its data: counts, lengths, and what looks wrong.

Nothing here runs the target; where it would write the answers, only the prompts are looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.chat import Example, encode_conversation, encode_prompt, encode_text
from dflash.config import DataSettings
from dflash.data import Conversation
from dflash.errors import DataError
from dflash.responses import check_room, too_short, unanswered
from dflash.target import TargetText

__all__ = ["Remark", "Survey", "survey"]

_THOUGHTS = re.compile(r"</?(?:think|thinking|thought|reasoning)>")


@dataclass(frozen=True)
class Remark:
    """One thing that looks wrong, or (not `serious`) that is good to know."""

    kind: str
    """A stable word for programs."""
    text: str
    serious: bool = True


@dataclass
class Survey:
    """Figures of one pass over the conversations; `shown` are the first few sequences."""

    rows: int = 0
    kept: int = 0
    waiting: int = 0
    """Kept rows whose answer the target writes: only their prompts are counted."""
    tokens: int = 0
    learned: int = 0
    """Tokens that the loss is about."""
    cut: int = 0
    cut_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of every kept sequence; prompts where the answer is still to be written."""
    problems: list[DataError] = field(default_factory=list)
    shown: list[Example] = field(default_factory=list)
    signs: dict[str, list[str]] = field(default_factory=dict)
    """Origins of the rows that show each suspicious sign."""
    notes: list[Remark] = field(default_factory=list)

    @property
    def skipped(self) -> Counter[str]:
        """Rows left out, by reason."""
        return Counter(problem.kind for problem in self.problems)

    @property
    def remarks(self) -> list[Remark]:
        """What to warn of, the rows' signs first."""
        found = []
        for kind, origins in self.signs.items():
            rows = f"{len(origins)} rows" if len(origins) > 1 else "1 row"
            found.append(Remark(kind, f"{rows}, the first {origins[0]}: {_SIGNS[kind]}"))
        return found + self.notes

    def histogram(self) -> list[tuple[int, int]]:
        """(longest length, sequences) of each class; classes double from 16 tokens."""
        classes: Counter[int] = Counter()
        for length in self.lengths:
            top = 16
            while top < length:
                top *= 2
            classes[top] += 1
        if not classes:
            return []
        tops, top = [], min(classes)
        while top <= max(classes):
            tops.append((top, classes[top]))
            top *= 2
        return tops

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the shown sequences left out."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "waiting_for_the_target": self.waiting,
            "skipped": dict(self.skipped),
            "problems": [str(problem) for problem in self.problems[:20]],
            "tokens": self.tokens,
            "learned_tokens": self.learned,
            "cut_rows": self.cut,
            "cut_tokens": self.cut_tokens,
            "lengths": [{"up_to": top, "rows": count} for top, count in self.histogram()],
            "warnings": [{"kind": r.kind, "text": r.text} for r in self.remarks if r.serious],
            "notes": [{"kind": r.kind, "text": r.text} for r in self.remarks if not r.serious],
        }


_SIGNS = {
    "mask-empty": "no token is the assistant's, so there is nothing to learn",
    "mask-full": "every token is the assistant's, the prompt too; look at data.mask and the text",
    "no-eos": "the last answer has no end token in the loss, so the drafter does not learn to stop",
    "thinking": "thinking tags are part of what is learned; train in the mode that is served "
    "(template arguments such as enable_thinking, or data without thoughts)",
    "bos-doubled": "the sequence begins with two begin-of-text tokens; take one out of the data "
    "or of the template",
    "truncated": "longer than data.max_length or than the target reads: cut there",
}


def survey(
    conversations: Sequence[Conversation],
    text: TargetText,
    settings: DataSettings,
    *,
    bad: Sequence[DataError] = (),
    show: int = 0,
) -> Survey:
    """Look at all conversations as training would; `bad` are rows that reading left out.

    Rows that training would refuse are counted, whatever `settings.on_bad` says.
    """
    found = Survey(rows=len(conversations) + len(bad), problems=list(bad))
    for conversation in conversations:
        try:
            _look(conversation, text, settings, found, show)
        except DataError as error:
            found.problems.append(error)
    _note_settings(found, text, settings)
    return found


def _look(
    conversation: Conversation, text: TargetText, settings: DataSettings, found: Survey, show: int
) -> None:
    origin, limit = conversation.origin, min(settings.max_length, text.max_position_embeddings)
    if not conversation.answered:
        if settings.responses == "never":
            raise unanswered(origin)
        prompt = encode_prompt(text.tokenizer, conversation.messages, origin, conversation.tools)
        check_room(prompt, settings.max_length, text.max_position_embeddings, origin)
        example = Example(tuple(prompt), (False,) * len(prompt), origin)
        found.waiting += 1
        _sign(found, "bos-doubled", origin, _bos_doubled(example, text))
    else:
        whole = _encoded(conversation, text, settings)
        example = whole.cut(limit)
        if len(whole.ids) > limit:
            found.cut += 1
            found.cut_tokens += len(whole.ids) - limit
            _sign(found, "truncated", origin, True)
        _look_at_mask(example, whole, text, found)
        if not example.anchors:
            raise too_short(example, settings.max_length)
    found.kept += 1
    found.tokens += len(example.ids)
    found.learned += sum(example.loss_mask)
    found.lengths.append(len(example.ids))
    if len(found.shown) < show:
        found.shown.append(example)


def _encoded(conversation: Conversation, text: TargetText, settings: DataSettings) -> Example:
    tokenizer, origin, stops = text.tokenizer, conversation.origin, text.eos_ids
    if conversation.text is not None:
        return encode_text(tokenizer, conversation.text, settings.marker, stops, origin)
    return encode_conversation(tokenizer, conversation.messages, stops, origin, conversation.tools)


def _look_at_mask(example: Example, whole: Example, text: TargetText, found: Survey) -> None:
    origin, learned = (
        example.origin,
        [i for i, m in zip(whole.ids, whole.loss_mask, strict=True) if m],
    )
    _sign(found, "mask-empty", origin, not any(example.loss_mask))
    _sign(found, "mask-full", origin, bool(example.ids) and all(example.loss_mask))
    _sign(found, "no-eos", origin, bool(learned) and learned[-1] not in text.eos_ids)
    said = text.tokenizer.decode(learned, skip_special_tokens=False)
    _sign(found, "thinking", origin, _THOUGHTS.search(said) is not None)
    _sign(found, "bos-doubled", origin, _bos_doubled(example, text))


def _bos_doubled(example: Example, text: TargetText) -> bool:
    bos = getattr(text.tokenizer, "bos_token_id", None)
    return bos is not None and example.ids[:2] == (bos, bos)


def _sign(found: Survey, kind: str, origin: str, shows: bool) -> None:
    if shows:
        found.signs.setdefault(kind, []).append(origin)


def _note_settings(found: Survey, text: TargetText, settings: DataSettings) -> None:
    def note(kind: str, words: str, *, serious: bool = False) -> None:
        found.notes.append(Remark(kind, words, serious))

    template = getattr(text.tokenizer, "chat_template", None)
    if template is None:
        note("no-template", "the target has no chat template: prompt and answer are joined as text")
    elif "endgeneration" not in str(template):
        note(
            "no-marks",
            "the template does not mark the assistant's text ({% generation %}); the mask comes "
            "from rendering with and without each answer",
        )
    if not text.eos_ids:
        note("no-end-token", "the target names no end token at all", serious=True)
    if found.waiting:
        note("waiting", f"the target writes {found.waiting} answers; only the prompts are here")
    if settings.responses == "always":
        note(
            "rewritten",
            "data.responses is always: the target rewrites all answers, those here are the file's",
        )
