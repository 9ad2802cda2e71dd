"""Which kind of value each entry of a drafter's ``config.json`` has.

A file from elsewhere may hold anything; this is checked before any of it is used, so that a wrong
entry is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["entry_problems"]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    return (_whole(value) or isinstance(value, float)) and 0 < value < math.inf


def _whole_list(value: Any) -> bool:
    return isinstance(value, list) and all(_whole(item) for item in value)


def _text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _tokens(value: Any) -> bool:
    return _whole(value) or _whole_list(value)


_Kind = tuple[str, Callable[[Any], bool]]
_WHOLE: _Kind = ("a whole number", _whole)
_POSITIVE: _Kind = ("a number above 0", _positive)
_LAYERS: _Kind = ("a list of whole numbers", _whole_list)
_TEXTS: _Kind = ("a list of texts", _text_list)
_OBJECT: _Kind = ("an object", _mapping)
_TOKENS: _Kind = ("a token or a list of tokens", _tokens)

_KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(
        (
            "block_size",
            "draft_vocab_size",
            "head_dim",
            "hidden_size",
            "intermediate_size",
            "mask_token_id",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_target_layers",
            "target_hidden_size",
            "target_num_hidden_layers",
            "vocab_size",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(("initializer_range", "partial_rotary_factor", "rms_norm_eps"), _POSITIVE),
    **dict.fromkeys(("factor", "original_max_position_embeddings", "rope_theta"), _POSITIVE),
    **dict.fromkeys(("aux_hidden_state_layer_ids", "target_layer_ids"), _LAYERS),
    **dict.fromkeys(("architectures", "layer_types"), _TEXTS),
    **dict.fromkeys(("dflash_config", "rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("speculators_config", "transformer_layer_config", "verifier"), _OBJECT),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), _TOKENS),
}

# null in these would be taken for a value; in all others it means that the entry is left out.
_NEVER_NULL = frozenset({"initializer_range", "max_position_embeddings", "rms_norm_eps"})


def entry_problems(raw: Mapping[str, Any]) -> list[str]:
    """One sentence for each entry, at any depth, that has the wrong kind of value.

    >>> entry_problems({"block_size": "16", "dflash_config": {"target_layer_ids": 3}})
    ["block_size is '16', not a whole number", 'target_layer_ids is 3, not a list of whole numbers']
    """
    return list(_problems(raw))


def _problems(part: Mapping[str, Any]) -> Iterator[str]:
    for name, value in part.items():
        wanted, fits = _KINDS.get(name, ("", lambda _: True))
        if value is None:
            if name in _NEVER_NULL:
                yield f"{name} is null, not {wanted}"
        elif not fits(value):
            yield f"{name} is {value!r}, not {wanted}"
        elif isinstance(value, Mapping) and name in _KINDS:
            yield from _problems(value)
