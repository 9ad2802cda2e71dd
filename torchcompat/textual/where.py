"""`python -m torchcompat where`: the place in torch that a name or an error message is about.

The installed torch is found without being imported, and read as text; so is any other (`--torch`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torchcompat import config, plugins
from torchcompat.errors import nearest
from torchcompat.textual.lock import installed
from torchcompat.textual.search import (
    Files,
    Hit,
    Use,
    find_definitions,
    find_messages,
    nearest_messages,
    uses,
)
from torchcompat.textual.tree import open_tree

_SYMBOL: Final = re.compile(r"(?:([\w.]+):)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_DEFINED: Final = re.compile(
    r"^[ \t]*(?:async )?(?:def|class)[ \t]+(\w+)|^([A-Za-z_]\w*)[ \t]*(?::[^=\n]+)?=(?!=)", re.M
)
#: Places whose source is shown; of the others only where they are.
_WITH_SOURCE: Final = 5
_MAX_LINES: Final = 60


@dataclass(frozen=True)
class Found:
    """One place, and who uses the variable that it is."""

    hit: Hit
    uses: dict[Use, list[str]] = field(default_factory=dict)

    def to_dict(self, context: int) -> dict[str, Any]:
        hit = self.hit
        lines = hit.source.part(hit.first, hit.last, context)
        return {
            "place": hit.place,
            "kind": hit.kind,
            "file": hit.source.file,
            "line": hit.first,
            "last_line": hit.last,
            "first_shown": lines[0][0] if lines else hit.first,
            "source": [text for _, text in lines],
            **{str(use): places for use, places in self.uses.items()},
        }

    def lines(self, root: str, context: int, with_source: bool) -> Iterator[str]:
        hit = self.hit
        yield f"{root}/{hit.source.file}:{hit.first}: {hit.kind} {hit.place}"
        shown = hit.source.part(hit.first, hit.last, context) if with_source else []
        for number, text in shown[:_MAX_LINES]:
            yield f"{number:>6}  {text}".rstrip()
        if len(shown) > _MAX_LINES:
            yield f"        … {len(shown) - _MAX_LINES} more lines, to {hit.last}"
        for use, places in self.uses.items():
            yield f"  {use}: {', '.join(places) if places else 'nobody'}"


def find(files: Files, name: str) -> list[Found]:
    """The places that `name` stands for: a patch's, a symbol's, or those of a message."""
    catalog = plugins.load(config.load())
    registered = catalog.patches.get(name)
    if registered is not None:
        hits = [h for place in places_of(registered.patch) for h in _symbol(files, place)]
    elif _SYMBOL.fullmatch(name):
        hits = _symbol(files, name)
    else:
        hits = find_messages(files, name)
    return [Found(hit, _uses(files, hit)) for hit in hits]


def places_of(edit: Any) -> Iterator[str]:
    """The places that a patch, or an edit, says it changes."""
    parts = getattr(edit, "edits", None) or getattr(edit, "variables", None)
    if parts:
        for part in parts:
            yield from places_of(part)
    elif isinstance(getattr(edit, "target", None), str):
        yield edit.target
    elif hasattr(edit, "module") and hasattr(edit, "name"):
        yield f"{edit.module}:{edit.name}"
    else:
        yield from edit.modules


def _symbol(files: Files, name: str) -> list[Hit]:
    if files.tree.file_of(name) is not None:  # a module
        source = files.source(files.tree.file_of(name) or "", name)
        return [Hit(source, "", "module", 1, 1)] if source is not None else []
    match = _SYMBOL.fullmatch(name)
    if match is None:
        return []
    module, path = match[1], match[2]
    if module is None:
        # "torch.fx.Tracer": the longest module that it begins with
        parts = path.split(".")
        for count in range(len(parts) - 1, 0, -1):
            if files.tree.file_of(".".join(parts[:count])) is not None:
                module, path = ".".join(parts[:count]), ".".join(parts[count:])
                break
    return find_definitions(files, module, path)


def _uses(files: Files, hit: Hit) -> dict[Use, list[str]]:
    is_flag = hit.kind == "variable" and "." not in hit.name
    return uses(files, hit.source.module, hit.name) if is_flag else {}


def _suggestion(files: Files, name: str) -> str:
    """The closing words of "not found"."""
    if _SYMBOL.fullmatch(name) is None:
        close = nearest_messages(files, name)
        return f"nearest: {'; '.join(map(repr, close))}" if close else "no message is like it"
    module, _, path = name.rpartition(":")
    own = files.tree.file_of(module)
    known: set[str] = set(plugins.load(config.load()).patches) if not module else set()
    for file in [own] if own is not None else files.likely:
        for match in _DEFINED.finditer(files.raw(file).decode("utf-8", "replace")):
            known.add(match[1] or match[2])
    last = path.rpartition(".")[2]
    return nearest(last, (n for n in known if abs(len(n) - len(last)) <= 3))


def command(args: argparse.Namespace) -> int:
    """Exit status 0: found; 1: not."""
    tree = open_tree(args.torch or installed())
    files = Files(tree)
    found = find(files, args.name)
    build = tree.build()
    if not found:
        print(
            f"torchcompat: {args.name!r} is not in {build}; {_suggestion(files, args.name)}",
            file=sys.stderr,
        )
        if args.json:
            print(json.dumps({"name": args.name, "torch": build.to_dict(), "found": []}, indent=2))
        return 1
    if args.json:
        places = [one.to_dict(args.context) for one in found]
        content = {"name": args.name, "torch": build.to_dict(), "found": places}
        print(json.dumps(content, indent=2))
        return 0
    print(f"{build}, {tree.label}")
    for i, one in enumerate(found):
        print("", *one.lines(tree.shown_root, args.context, i < _WITH_SOURCE), sep="\n")
    return 0


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "where",
        help="the place in torch that a patch, a name or an error message is about",
        parents=[common],
    )
    parser.add_argument("name", metavar="NAME", help="a patch id, a symbol, or an error's text")
    parser.add_argument("--torch", metavar="TARGET", help="a wheel, checkout or folder instead")
    parser.add_argument("--context", metavar="N", type=_count, default=2, help="lines around it")
    parser.set_defaults(run=command)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number
