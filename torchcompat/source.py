"""How a patch recognises the code it was written for: parameter names, source text, source hash.

Never by line number. The hash is over the dedented source with trailing blanks stripped: of 793
functions of torch 2.14.1 it is the one form equal under every Python from 3.10 to 3.13 (parsed or
tokenised forms differ for up to all of them).
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def parameters(function: Any) -> tuple[str, ...] | None:
    """Parameter names in order, through wrappers; None where a callable does not say."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def text(function: Any) -> str | None:
    """The normalised source of a function or class, through wrappers; None if it cannot be had."""
    try:
        lines = inspect.getsource(inspect.unwrap(function)).splitlines()
    except (OSError, TypeError, ValueError):
        return None
    return textwrap.dedent("\n".join(line.rstrip() for line in lines)).strip("\n") + "\n"


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
    source = text(function)
    if source is None:
        return "has no readable source"
    if hashes and digest(function) in hashes:
        return None
    lacking = [a for a in anchors if a not in source]
    if lacking:
        return f"no longer contains {lacking[0]!r}"
    return None if anchors else f"has unknown source {digest(function)}"
