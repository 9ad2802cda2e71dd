"""Which answers the target writes itself, and the file that keeps them.

A drafter learns what *this* target says, so a response in the target's own words is worth more than
a better one by somebody else. Answers are written turn by turn: those of a conversation's first
turn all together, then the second turn's, each after the history as the target made it.

What is written is kept in responses.jsonl at once. A resumed run plans the same batches and goes on
with the first one that is not complete: the text does not depend on where the run was cut.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dflash.chat import (
    Example,
    encode_conversation,
    encode_prompt,
    encode_text,
    with_response,
)
from dflash.config import DataSettings
from dflash.data import Conversation, Rejects
from dflash.errors import DataError
from dflash.placement import on_device
from dflash.progress import ProgressBar
from dflash.respond import plan_batches, respond_batch
from dflash.run_dir import append_line, read_lines, rewrite_lines
from dflash.target import Target
from dflash.workers import StopSignal, share

__all__ = ["check_room", "too_short", "training_examples", "unanswered"]

Messages = tuple[Mapping[str, Any], ...]


def training_examples(
    conversations: Sequence[Conversation],
    targets: Sequence[Target],
    settings: DataSettings,
    keep_in: Path,
    stop: StopSignal,
    say: Callable[[str], None],
) -> list[Example]:
    """The training sequences of all conversations, in their order, answers written where asked.

    `settings.on_bad` says what a conversation does that cannot be used: one that the chat template
    refuses, whose prompt fills the whole length, or whose answer is too short to start a block in.
    An answer that the target itself kept too short is left out in any case. Raises DataError.
    """
    rejects = Rejects(settings.on_bad)
    writer = _Writer(targets, settings, keep_in, stop)
    drafts = []
    for conversation in conversations:
        try:
            drafts.append(_Draft.of(conversation, settings.responses))
        except DataError as error:
            rejects.add(error)
    while writer.round(drafts, rejects):
        pass
    examples, short = [], 0
    for draft in drafts:
        if draft.rejected:
            continue
        try:
            example = _example(draft, targets[0], settings)
        except DataError as error:
            rejects.add(error)
            continue
        if example.anchors:
            examples.append(example)
        elif draft.written is not None:
            short += 1
        else:
            rejects.add(too_short(example, settings.max_length))
    if short:
        say(f"{short} answers of the target are too short to draft in (one token): left out")
    if rejects.problems:
        say(f"left out {len(rejects.problems)} conversations; the first: {rejects.problems[0]}")
    if not examples:
        raise DataError("no conversation is left to train on")
    return examples


@dataclass
class _Draft:
    """A conversation on its way to a training sequence."""

    origin: str
    messages: Messages
    """Up to where the next answer goes; complete when `rest` is empty and nothing is wanted."""
    rest: Messages
    """What follows the next answer."""
    wanted: bool
    """Whether the target writes the next answer."""
    tools: tuple[Any, ...] = ()
    text: str | None = None
    """A rendered text, which is taken as it is."""
    written: list[int] | None = None
    """Tokens of the last answer, if the target wrote it."""
    turn: int = 0
    rejected: bool = False

    @staticmethod
    def of(conversation: Conversation, mode: str) -> _Draft:
        messages, origin = conversation.messages, conversation.origin
        tools = conversation.tools
        if conversation.text is not None:
            return _Draft(origin, (), (), wanted=False, text=conversation.text)
        if mode == "never" and not conversation.answered:
            raise unanswered(origin)
        if mode != "always":
            return _Draft(origin, messages, (), not conversation.answered, tools)
        end, rest = _next_answer(messages)
        return _Draft(origin, messages[:end], rest, True, tools)

    def take(self, response: list[int], text: str) -> None:
        """The target's answer: keep it if it is the last one, else go on to the next."""
        self.turn += 1
        if not self.rest:
            self.written, self.wanted = response, False
            return
        whole = (*self.messages, {"role": "assistant", "content": text}, *self.rest)
        begin = len(self.messages) + 1
        end, self.rest = _next_answer(whole, begin)
        self.messages = whole[:end]


def _next_answer(messages: Messages, begin: int = 0) -> tuple[int, Messages]:
    """Where the first answer from `begin` on goes, and what follows it."""
    for index in range(begin, len(messages)):
        if messages[index]["role"] == "assistant":
            return index, messages[index + 1 :]
    return len(messages), ()


class _Writer:
    """Writes the next answer of every conversation that wants one, by all targets together."""

    def __init__(
        self, targets: Sequence[Target], settings: DataSettings, keep_in: Path, stop: StopSignal
    ) -> None:
        self._targets = targets
        self._settings = settings
        self._path = keep_in
        self._stop = stop
        self._lock = threading.Lock()
        kept = read_lines(keep_in)
        self._kept: dict[str, list[int]] = {record["key"]: record["ids"] for record in kept}
        if kept:  # a line that a crash cut short goes, or the next one would be joined to it
            rewrite_lines(keep_in, kept)

    def round(self, drafts: Sequence[_Draft], rejects: Rejects) -> bool:
        """One answer for each that wants one; whether there was any."""
        writing: list[tuple[_Draft, list[int]]] = []
        for draft in drafts:
            if draft.wanted and not draft.rejected:
                try:
                    writing.append((draft, self._prompt(draft)))
                except DataError as error:
                    rejects.add(error)
                    draft.rejected = True
        if not writing:
            return False
        prompts = [prompt for _, prompt in writing]
        keys = [self._key(draft, prompt) for draft, prompt in writing]
        batches = plan_batches(prompts, self._settings.response_batch)
        missing = [batch for batch in batches if any(keys[i] not in self._kept for i in batch)]
        self._write(missing, prompts, keys)
        decode = self._targets[0].tokenizer.decode
        for (draft, _), key in zip(writing, keys, strict=True):
            ids = self._kept[key]
            draft.take(ids, decode(ids, skip_special_tokens=True))
        return True

    def _write(self, batches: list[list[int]], prompts: list[list[int]], keys: list[str]) -> None:
        if not batches:
            return
        with ProgressBar("responses", sum(map(len, batches)), "written") as bar:

            def work(target: Target, number: int) -> None:
                batch = batches[number]
                done = 0

                def tell(finished: int, _tokens: int) -> None:
                    nonlocal done
                    self._stop.check()
                    bar.advance(finished - done)
                    done = finished

                with on_device(target.device):
                    texts = respond_batch(
                        target, [prompts[i] for i in batch], self._settings.max_new_tokens, tell
                    )
                self._keep(target, {keys[i]: ids for i, ids in zip(batch, texts, strict=True)})

            workers = {f"target-{n}": partial(work, t) for n, t in enumerate(self._targets)}
            share(workers, len(batches), stop=self._stop)

    def _keep(self, target: Target, written: Mapping[str, list[int]]) -> None:
        with self._lock:
            for key, ids in written.items():
                if key not in self._kept:  # a batch that was cut in half is written once more
                    text = target.tokenizer.decode(ids)
                    append_line(self._path, {"key": key, "ids": ids, "text": text})
                    self._kept[key] = ids

    def _prompt(self, draft: _Draft) -> list[int]:
        target = self._targets[0]
        prompt = encode_prompt(target.tokenizer, draft.messages, draft.origin, draft.tools)
        reads = target.spec.max_position_embeddings
        check_room(prompt, self._settings.max_length, reads, draft.origin)
        return prompt

    def _key(self, draft: _Draft, prompt: Sequence[int]) -> str:
        """Names an answer: of which conversation, to which prompt, how long at most."""
        text = f"{draft.origin}|{draft.turn}|{self._settings.max_new_tokens}|{list(prompt)}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _example(draft: _Draft, target: Target, settings: DataSettings) -> Example:
    tokenizer, stops = target.tokenizer, target.spec.eos_ids
    messages, origin, tools = draft.messages, draft.origin, draft.tools
    if draft.text is not None:
        example = encode_text(tokenizer, draft.text, settings.marker, stops, origin)
    elif draft.written is None:
        example = encode_conversation(tokenizer, messages, stops, origin, tools)
    else:
        example = with_response(tokenizer, messages, stops, draft.written, origin, tools)
    return example.cut(min(settings.max_length, target.spec.max_position_embeddings))


def unanswered(origin: str) -> DataError:
    """What a conversation without an answer is where the target may not write one."""
    return DataError(
        f"{origin}: it has no response, and data.responses is never", kind="without an answer"
    )


def check_room(prompt: Sequence[int], max_length: int, reads: int, origin: str) -> None:
    """Raises DataError where an answer to `prompt` would not fit; `reads`: the target's limit."""
    if len(prompt) > min(max_length, reads) - 2:
        raise DataError(
            f"{origin}: its prompt has {len(prompt)} tokens, which leaves no room for an "
            f"answer in data.max_length={max_length} (the target reads {reads}); raise it, or "
            "data.on_bad=skip",
            kind="prompt too long",
        )


def too_short(example: Example, max_length: int) -> DataError:
    """What an example is in which no block can start."""
    return DataError(
        f"{example.origin}: too short for a block: of {len(example.ids)} tokens (data.max_length="
        f"{max_length}) no two in a row are the assistant's; give a longer answer or "
        "data.on_bad=skip",
        kind="too short for a block",
    )
