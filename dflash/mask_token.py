"""Choose the token whose embedding stands for "to be drafted".

It must be a row of the target's embedding that no text contains, and the same in training, on
disk and in a server; the checkpoint's config.json carries it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from dflash.errors import ConfigError


class MaskToken(NamedTuple):
    """The row, and why this one."""

    id: int
    reason: str


def choose_mask_token(
    tokenizer: Any,
    *,
    vocab_size: int,
    reserved: Collection[int],
    used: Collection[int],
    asked: int = -1,
) -> MaskToken:
    """As asked; else the tokenizer's mask token; else a row that no token has; else a special
    token that neither ends a text nor occurs in the training data.

    `reserved` are end and padding tokens: as a mask they would carry their own meaning (the pad
    token often is the end token). `used` are all tokens of the training data. Raises ConfigError
    that names drafter.mask_token_id if the one asked for cannot serve, or none can be found.
    """
    if asked >= 0:
        if asked >= vocab_size:
            raise ConfigError(
                f"drafter.mask_token_id is {asked}; the target's embedding has {vocab_size} rows"
            )
        if asked in used:
            raise ConfigError(
                f"drafter.mask_token_id is {asked}, a token of the training data; take one that "
                "no text contains"
            )
        return MaskToken(asked, "as asked")
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own not in used:
        return MaskToken(int(own), "the tokenizer's mask token")
    tokens = len(tokenizer)
    if tokens < vocab_size:
        return MaskToken(tokens, f"the first row without a token (of {vocab_size - tokens})")
    begins = {getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "unk_token_id", None)}
    taken = set(reserved) | set(used) | begins
    special = sorted(int(i) for i in getattr(tokenizer, "all_special_ids", ()))
    added = sorted(int(i) for i in getattr(tokenizer, "added_tokens_decoder", {}))
    for candidate in [*reversed(added), *reversed(special)]:
        if candidate not in taken and candidate < vocab_size:
            text = tokenizer.convert_ids_to_tokens(candidate)
            return MaskToken(candidate, f"the special token {text}, which the data never has")
    raise ConfigError(
        "no token is free to be the mask token: every row of the target's embedding has a token "
        "and every special token is in use; set drafter.mask_token_id to one that no text contains"
    )
