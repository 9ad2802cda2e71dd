"""How a patch recognises the code it was written for: parameter names, source text, source hash.

Never by line number. The hash is over the dedented source with trailing blanks stripped: of 793
functions of torch 2.14.1 it is the one form equal under every Python from 3.10 to 3.13 (parsed or
tokenised forms differ for up to all of them).
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import textwrap
import tokenize
from types import FunctionType
from typing import Any, Final

_HEADS: Final = ("def ", "class ", "async def ")


def parameters(function: Any) -> tuple[str, ...] | None:
    """Parameter names in order, through wrappers; None where a callable does not say."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def text(function: Any) -> str | None:
    """The normalised source of a function or class, through wrappers; None if it cannot be had."""
    try:
        lines = [line.rstrip() for line in _lines(inspect.unwrap(function))]
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):
        return None
    return textwrap.dedent("\n".join(lines)).strip("\n") + "\n"


def _lines(value: Any) -> list[str]:
    """What `inspect.getsourcelines` gives, without its search through all of `sys.modules` and,
    for a class before Python 3.13, its parse of the whole file."""
    following = _lines_from(value)
    return inspect.getblock(following) if following else inspect.getsourcelines(value)[0]


def _lines_from(value: Any) -> list[str]:
    """The file's lines from the first of `value` on; none where they are not easily found."""
    if isinstance(value, FunctionType):
        start = value.__code__.co_firstlineno
        lines = linecache.getlines(value.__code__.co_filename, value.__globals__)
    elif isinstance(value, type):
        lines = _lines_of_module(value.__module__)
        start = _line_of_class(value, lines)
    else:
        return []
    return lines[start - 1 :] if start > 0 else []


def _contains_all(function: Any, anchors: tuple[str, ...]) -> bool:
    """Whether a first look at the source, which may end too early, finds all anchors.

    `text` finds the end with a tokenizer, in Python before 3.12; this runs while torch is being
    imported."""
    lines = _lines_from(inspect.unwrap(function))
    seen = textwrap.dedent("\n".join(line.rstrip() for line in _first_block(lines)))
    return all(anchor in seen for anchor in anchors)


def _first_block(lines: list[str]) -> list[str]:
    """From decorators and `def` or `class` to the first line of code that is no further right."""
    if not lines or not lines[0].lstrip().startswith(("@", *_HEADS)):
        return []
    indent = len(lines[0]) - len(lines[0].lstrip())
    inside = False
    for i, line in enumerate(lines):
        inner = line.lstrip()
        if inner and len(line) - len(inner) <= indent:
            if inside:
                return lines[:i]
            inside = inner.startswith(_HEADS)
    return lines


def _lines_of_module(name: str) -> list[str]:
    names = vars(sys.modules[name]) if name in sys.modules else {}
    return linecache.getlines(names.get("__file__") or "", names)


def _line_of_class(cls: type, lines: list[str]) -> int:
    """Where the class's source begins; 0 where that takes more than a look at the lines: it is
    decorated, not at the top level, or there are several of the name."""
    opening = re.compile(rf"class {re.escape(cls.__qualname__)}\b")
    found = [number for number, line in enumerate(lines, 1) if opening.match(line)]
    if len(found) != 1 or (found[0] > 1 and lines[found[0] - 2].strip()):
        return 0
    return found[0]


def digest(function: Any) -> str | None:
    """First 16 hex digits of the SHA-256 of `text`."""
    import hashlib  # here for the sake of a quick `import torchcompat`

    source = text(function)
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()[:16]


def drift(
    function: Any,
    signature: tuple[str, ...] | None,
    anchors: tuple[str, ...],
    hashes: dict[str, str] | None = None,
) -> str | None:
    """Why `function` is not the code described, or None if it is.

    `hashes` ({digest: torch version}) is one way to be recognised and `anchors` (texts that the
    source must contain) another: with both given, either is enough.
    """
    if signature is not None and (found := parameters(function)) != signature:
        shown = "no readable signature" if found is None else f"({', '.join(found)})"
        return f"takes {shown}, not ({', '.join(signature)})"
    if not anchors and not hashes:
        return None
    if not hashes and _contains_all(function, anchors):
        return None
    source = text(function)
    if source is None:
        return "has no readable source"
    if hashes and digest(function) in hashes:
        return None
    lacking = [a for a in anchors if a not in source]
    if lacking:
        return f"no longer contains {lacking[0]!r}"
    return None if anchors else f"has unknown source {digest(function)}"
