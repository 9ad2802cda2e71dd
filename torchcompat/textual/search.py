"""Find definitions, uses of a module's variable, and messages in source text."""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from torchcompat.errors import SourceDrift
from torchcompat.textual.bindings import Import, imports
from torchcompat.textual.tree import Tree

Kind = Literal["function", "class", "variable", "import", "message", "module"]
Use = Literal["reads", "writes"]

#: Where the compiler stack lives; looked through first, and alone if that is enough.
LIKELY: Final = (
    "torch/_dynamo/",
    "torch/fx/",
    "torch/_functorch/",
    "torch/_inductor/",
    "torch/_higher_order_ops/",
    "torch/utils/",
    "torch/compiler/",
    "torch/autograd/",
    "torch/_export/",
    "torch/export/",
)
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,}")
#: What stands for a value in a message: of % and of format().
_HOLE: Final = re.compile(r"%(?:\(\w+\))?[srdifx]|\{[\w.!:\[\]]*\}|\0")
_LONGEST_PART: Final = 8
_ALL_PARTS: Final = 12

_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Source:
    """One parsed file."""

    file: str
    module: str
    text: str
    node: ast.Module

    def part(self, first: int, last: int, context: int = 0) -> list[tuple[int, str]]:
        """Numbered lines, `context` more on each side."""
        lines = self.text.splitlines()
        start, end = max(first - context, 1), min(last + context, len(lines))
        return [(number, lines[number - 1]) for number in range(start, end + 1)]


@dataclass(frozen=True)
class Hit:
    """A place in a file. `name` is the definition's own, or that of what a message is in."""

    source: Source
    name: str
    kind: Kind
    first: int
    last: int

    @property
    def place(self) -> str:
        return f"{self.source.module}:{self.name}" if self.name else self.source.module


class Files:
    """The files of torch in a tree, the likely ones first, each parsed once at most."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        names = {file: module for module, file in tree.modules("torch").items()}
        likely = [f for f in names if f.startswith(LIKELY)]
        self.likely = {f: names[f] for f in likely}
        self.others = {f: m for f, m in names.items() if f not in self.likely}
        self._raw: dict[str, bytes] = {}
        self._parsed: dict[str, Source | None] = {}

    def raw(self, file: str) -> bytes:
        if file not in self._raw:
            self._raw[file] = self.tree.bytes_of(file) or b""
        return self._raw[file]

    def source(self, file: str, module: str) -> Source | None:
        """None for a file that is not Python to this interpreter."""
        if file not in self._parsed:
            try:
                text = self.tree.text(file)
                self._parsed[file] = Source(file, module, text, ast.parse(text))
            except (SourceDrift, SyntaxError, ValueError, RecursionError, MemoryError):
                self._parsed[file] = None
        return self._parsed[file]

    def matching(self, files: dict[str, str], word: str, *patterns: str) -> Iterator[Source]:
        """The files with the word and all patterns: parsing is what takes time."""
        wanted = [re.compile(pattern.encode(), re.MULTILINE) for pattern in patterns]
        for file, module in files.items():
            raw = self.raw(file)
            if word.encode() in raw and all(pattern.search(raw) for pattern in wanted):
                source = self.source(file, module)
                if source is not None:
                    yield source


# -- definitions


def definitions(source: Source) -> Iterator[Hit]:
    """Functions, classes and variables of a module and of its classes, nested ones too."""
    yield from _defined(source, source.node.body, "")


def _defined(source: Source, body: list[ast.stmt], outer: str) -> Iterator[Hit]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            kind: Kind = "class" if isinstance(node, ast.ClassDef) else "function"
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield Hit(source, f"{outer}{node.name}", kind, first, node.end_lineno or first)
            yield from _defined(source, node.body, f"{outer}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name in _targets(node):
                yield Hit(source, f"{outer}{name}", "variable", node.lineno, _end(node))
        else:
            for inner in _blocks(node):
                yield from _defined(source, inner, outer)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                yield inner.id


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body
    for case in getattr(node, "cases", []):
        yield case.body


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def find_definitions(files: Files, module: str | None, name: str) -> list[Hit]:
    """By "Name.attribute", of one module or wherever it is. A name that the module only imports is
    followed to where it is from; what leads out of the text ends at the import."""
    if module is not None:
        return _find_in(files, module, name, set())
    *outer, last = name.split(".")
    patterns = [rf"\b(?:class|def)\s+{part}\b" for part in outer]
    patterns.append(rf"\b(?:class|def)\s+{last}\b|^[^=#\n]*\b{last}\b[^=\n]*=(?!=)")
    for group in (files.likely, files.others):
        hits = [
            hit
            for source in files.matching(group, last, *patterns)
            for hit in definitions(source)
            if hit.name == name or hit.name.endswith(f".{name}")
        ]
        # A variable inside a function is nobody's flag.
        hits = [h for h in hits if h.kind != "variable" or not _is_local(h)]
        if hits:
            return sorted(_last_of_each(hits), key=lambda h: (h.name != name, h.name.count(".")))
    return []


def _last_of_each(hits: list[Hit]) -> list[Hit]:
    """Of a variable that is bound several times the first, of a function the last."""
    found: dict[str, Hit] = {}
    for hit in hits:
        if hit.place not in found or hit.kind != "variable":
            found[hit.place] = hit
    return list(found.values())


def _is_local(hit: Hit) -> bool:
    """Whether a variable belongs to a function's body."""
    outer = hit.name.rpartition(".")[0]
    return bool(outer) and any(
        other.name == outer and other.kind == "function" for other in definitions(hit.source)
    )


def _find_in(files: Files, module: str, name: str, seen: set[str]) -> list[Hit]:
    file = files.tree.file_of(module)
    source = files.source(file, module) if file is not None else None
    if source is None or f"{module}:{name}" in seen:
        return []
    seen.add(f"{module}:{name}")
    hits = [hit for hit in definitions(source) if hit.name == name]
    if hits:
        return _last_of_each(hits)
    first, _, rest = name.partition(".")
    for node, one in imported(source):
        if one.name == "*" or one.bound != first:
            continue
        below = f"{one.module}.{one.name}" if one.name else one.module
        if files.tree.file_of(below) is not None:
            found = _find_in(files, below, rest, seen) if rest else []
        else:
            found = _find_in(files, one.module, f"{one.name}.{rest}".strip("."), seen)
        return found or [Hit(source, name, "import", node.lineno, _end(node))]
    return []


def imported(source: Source) -> Iterator[tuple[ast.stmt, Import]]:
    """What the file imports, inside functions too."""
    is_package = source.file.endswith("/__init__.py")
    package = source.module if is_package else source.module.rpartition(".")[0]
    for node in ast.walk(source.node):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for one in imports(node, package):
                yield node, one


# -- uses of a module's variable


def uses(files: Files, module: str, name: str) -> dict[Use, list[str]]:
    """Who reads and who writes the variable: "module:function (file:line,line)" each.

    In the module itself, and elsewhere in the likely packages as an attribute of any name that
    leads to the module, or imported by name.
    """
    found: dict[Use, dict[str, list[str]]] = {"reads": {}, "writes": {}}
    own = files.tree.file_of(module)
    group = {} if own is None else {own: module}
    group |= files.likely
    for source in files.matching(group, name):
        names = _names_for(source, module, name)
        if source.module != module and not names:
            continue
        for scope, node, body in _scopes(source.node, ""):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            own_name = source.module == module and not (is_function and _is_shadowed(body, name))
            for use, line in _uses_in(body, name, own_name, names):
                where = f"{source.module}:{scope}" if scope else source.module
                lines = found[use].setdefault(f"{where} ({source.file}", [])
                lines += [str(line)] if str(line) not in lines else []
    return {
        use: [f"{where}:{','.join(lines)})" for where, lines in places.items()]
        for use, places in found.items()
    }


def _names_for(source: Source, module: str, name: str) -> frozenset[str]:
    """How this file may call the module (dotted), or the variable itself (with a colon)."""
    found = {module} if any(one.bound == "torch" for _, one in imported(source)) else set()
    for _, one in imported(source):
        whole = f"{one.module}.{one.name}" if one.name else one.module
        if whole == module:
            found.add(one.bound)
        elif whole == f"{module}.{name}":
            found.add(f":{one.bound}")
        elif module.startswith(f"{whole}."):
            found.add(f"{one.bound}{module[len(whole) :]}")
    return frozenset(found)


def _scopes(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.AST, list[ast.AST]]]:
    """(name, node, everything in it but not in scopes inside it) of the module, and of all classes
    and functions in it."""
    own: list[ast.AST] = []
    inner: list[_Scope] = []
    todo = list(ast.iter_child_nodes(node))
    while todo:
        part = todo.pop()
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner.append(part)
            todo += part.decorator_list
            continue
        own.append(part)
        todo += ast.iter_child_nodes(part)
    yield outer, node, sorted(own, key=lambda n: getattr(n, "lineno", 0))
    for scope in sorted(inner, key=lambda n: n.lineno):
        yield from _scopes(scope, f"{outer}.{scope.name}".strip("."))


def _is_shadowed(body: list[ast.AST], name: str) -> bool:
    """Whether a name in a function's body is the function's own."""
    if any(isinstance(n, ast.Global) and name in n.names for n in body):
        return False
    return any(
        (isinstance(n, ast.arg) and n.arg == name)
        or (isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load))
        for n in body
    )


def _uses_in(
    body: list[ast.AST], name: str, own_name: bool, names: frozenset[str]
) -> Iterator[tuple[Use, int]]:
    for node in body:
        if isinstance(node, ast.Attribute) and node.attr == name:
            if ast.unparse(node.value) in names:
                yield _use(node.ctx), node.lineno
        elif isinstance(node, ast.Name) and (
            (own_name and node.id == name) or f":{node.id}" in names
        ):
            yield _use(node.ctx), node.lineno


def _use(context: ast.expr_context) -> Use:
    return "reads" if isinstance(context, ast.Load) else "writes"


# -- messages


def find_messages(files: Files, wanted: str) -> list[Hit]:
    """String literals with the wanted text, or of which the wanted text is an instance."""
    wanted = " ".join(wanted.split())
    # The words one after the other, over the quotes and prefixes between parts of a literal.
    between = r"""(?:\W|\b[rfbuRFBU]{1,2}(?=["']))+"""
    words = re.findall(r"\w+", wanted)
    if not words:
        return []
    pattern = between.join(map(re.escape, words))
    for group in (files.likely, files.others):
        hits = _messages_in(files.matching(group, max(words, key=len), pattern), wanted)
        if hits:
            return hits
    return _messages_in(_closest(files, wanted, 12), wanted)


def _messages_in(sources: Iterable[Source], wanted: str) -> list[Hit]:
    return [
        Hit(source, scope, "message", node.lineno, node.end_lineno or node.lineno)
        for source in sources
        for template, node, scope in _strings(source)
        if matches(template, wanted)
    ]


def nearest_messages(files: Files, wanted: str) -> list[str]:
    """Up to three literals that share most words with the wanted text."""
    words = set(_WORD.findall(wanted))
    scored: dict[str, int] = {}
    for source in _closest(files, wanted, 8):
        for template, _, _ in _strings(source):
            shared = len(words & set(_WORD.findall(template)))
            if shared >= 2 and len(template) < 500:
                scored[" ".join(template.replace("\0", "{}").split())] = shared
    return sorted(scored, key=lambda text: (-scored[text], len(text)))[:3]


def _closest(files: Files, wanted: str, count: int) -> Iterator[Source]:
    """The likely files that share most words with the text, rare words counting more: some of the
    text's words may be values, not the message's own."""
    words = [word.encode() for word in set(_WORD.findall(wanted))]
    having = {word: [f for f in files.likely if word in files.raw(f)] for word in words}
    scores: defaultdict[str, float] = defaultdict(float)
    for found in having.values():
        for file in found:
            scores[file] += math.log(len(files.likely) / len(found))
    for file in sorted(scores, key=lambda f: -scores[f])[:count]:
        source = files.source(file, files.likely[file])
        if source is not None:
            yield source


def matches(template: str, wanted: str) -> bool:
    """Whether `wanted` is part of the template, or contains it with its holes filled."""
    flat = " ".join(template.split())
    if wanted in flat:
        return True
    parts = _HOLE.split(flat)
    if max(map(len, parts)) < _LONGEST_PART or sum(map(len, parts)) < _ALL_PARTS:
        return False  # so little that it is in anything
    # Parts one after the other, rather than one pattern: that could take for ever.
    at = 0
    for part in parts:
        found = wanted.find(part.strip(), at)
        if found < 0:
            return False
        at = found + len(part.strip())
    return True


def _strings(source: Source) -> Iterator[tuple[str, ast.expr, str]]:
    """(text with \\0 for each value, node, scope) of every string but documentation."""
    for scope, _, body in _scopes(source.node, ""):
        inside: set[int] = set()
        for node in sorted(body, key=lambda n: -_size(n)):
            if isinstance(node, ast.Expr):
                inside.add(id(node.value))
            if isinstance(node, ast.expr) and id(node) not in inside:
                text = _template(node)
                if text is not None:
                    inside.update(id(part) for part in ast.walk(node))
                    yield text, node, scope


def _size(node: ast.AST) -> int:
    if not isinstance(node, (ast.expr, ast.stmt)) or node.end_lineno is None:
        return 0
    return (node.end_lineno - node.lineno) * 10_000 + (node.end_col_offset or 0) - node.col_offset


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        if left is None and right is None:
            return None
        return "".join("\0" if part is None else part for part in (left, right))
    return None
