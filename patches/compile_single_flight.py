"""compile_single_flight: whoever waited for a compile compiles the same again.

Every torch to date: a thread that finds no compiled code for its call takes the compile lock and
compiles. Nothing looks again once the lock is had, so N threads that make a function's first call
together compile it N times, one after the other. Each duplicate takes one of the function's eight
cache entries: from nine threads on, every later shape runs eager for good.

`CatchErrorsWrapper.__call__` gets code of its own source that looks under the lock for an entry
whose backend and guards fit the call, and hands its code back. The evaluator files whatever it is
handed as a new entry; that one gets torch's own mark of an invalidated entry, so it is used for
this call and never matches again, and `compute_cache_size` leaves it out of the count. A thread
that waited for a compile that came to "do not compile this function" gets that answer too.

No thread waits where it did not wait before, and nothing of the lookup before the lock changes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
import time
import weakref
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat.activity import Doing
from torchcompat.errors import SourceDrift
from torchcompat.patch import Code, Patch, Wrap
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
_GUARDS: Final = "torch._dynamo.guards"
_EVALUATOR: Final = "torch._C._dynamo.eval_frame"
_UNDER_LOCK: Final = "with compile_lock, _disable_current_modes():"
# What leads from a callback to the user's backend, in this and in older torch.
_TO_BACKEND: Final = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def _backend_of(callback: Any) -> Any:
    """What the evaluator compares entries by."""
    while True:
        inner = next((n for n in _TO_BACKEND if hasattr(callback, n)), None)
        if inner is None:
            return callback
        callback = getattr(callback, inner)


def _records_more_than_code(callback: Any) -> bool:
    """Whether somebody wants what a compile leaves behind, not only its code: export does."""
    inner = next((getattr(callback, n) for n in _TO_BACKEND if hasattr(callback, n)), None)
    return any(
        getattr(c, "_export", False) or getattr(c, "_package", None) is not None
        for c in (callback, inner)
    )


def _is_spent(entry: Any) -> bool:
    return getattr(entry.guard_manager, "_torchcompat_spent", False)


def _region() -> int:
    """Of `isolate_recompiles`, where torch has it: which entries a call may use."""
    read = getattr(sys.modules[_EVALUATOR], "get_eval_frame_isolate_recompiles_id", None)
    return -1 if read is None else int(read())


@dataclass(frozen=True)
class _Unfiled:
    """Compiled code between the lock's release and the evaluator's filing it, which only the
    thread that compiled can do. It looks like the entry that it is going to be."""

    guards: weakref.ref[Any]  # weak: this must not keep compiled code alive
    made: weakref.ref[CodeType]
    compile_id: Any
    trace_annotation: str
    backend: Any
    isolate_recompiles_id: int
    since: float

    @property
    def guard_manager(self) -> Any:
        return self.guards()

    @property
    def code(self) -> Any:
        return self.made()

    def is_over(self) -> bool:
        """Filing sets the entry on the guards; and nobody is in between for seconds."""
        manager = self.guards()
        filed = manager is None or manager.cache_entry is not None or self.made() is None
        return filed or time.monotonic() - self.since > 5


def _fits(entry: Any, backend: Any, region: int, f_locals: dict[str, Any]) -> bool:
    """Whether the evaluator's lookup would take `entry`; where that cannot be told, it does not."""
    manager = entry.guard_manager
    if manager is None or isinstance(manager, sys.modules[_GUARDS].DeletedGuardManagerWrapper):
        return False
    if getattr(entry, "isolate_recompiles_id", -1) not in (region, -1):
        return False
    try:
        same = entry.backend is backend or bool(entry.backend == backend)
        return same and bool(manager.check(f_locals))
    except Exception:  # noqa: BLE001 - a guard or a backend's __eq__ may run anybody's code
        return False


class _Flight(Doing):
    """One thread's way through the lock, for `torchcompat.threads` to see. `arrived`: when it came,
    by the clock of `_Flights`."""

    __slots__ = ("arrived",)

    def __init__(self, code: CodeType, arrived: int) -> None:
        lock = getattr(sys.modules.get(_CONVERT_FRAME), "compile_lock", None)
        super().__init__("wait_compile", code, lock)
        self.arrived = arrived


class _Flights:
    """What the new code calls, as a constant in it. `note` and `result_for` run under the lock."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        #: id of a code object -> its death watch, when it was refused, the answer
        self._refusals: dict[int, tuple[weakref.ref[CodeType], int, Any]] = {}
        self._unfiled: list[tuple[weakref.ref[CodeType], _Unfiled]] = []

    def flight(self, frame: Any) -> _Flight:
        return _Flight(frame.f_code, next(self._clock))

    def note(self, callback: Any, frame: Any, result: Any) -> Any:
        """Keep what the evaluator does not show yet of a compile's answer; gives `result` back."""
        code = frame.f_code
        self._refusals.pop(id(code), None)
        # 2.6 answers with the code itself
        guarded = getattr(result, "guarded_code", result if hasattr(result, "code") else None)
        if guarded is not None:
            unfiled = _Unfiled(
                weakref.ref(guarded.guard_manager),
                weakref.ref(guarded.code),
                guarded.compile_id,
                getattr(guarded, "trace_annotation", "Unknown"),
                _backend_of(callback),
                _region(),
                time.monotonic(),
            )
            self._unfiled.append((weakref.ref(code), unfiled))
        elif getattr(result, "apply_to_code", True):
            gone = weakref.ref(code, functools.partial(self._forget, id(code)))
            self._refusals[id(code)] = (gone, next(self._clock), result)
        return result

    def _forget(self, key: int, _: weakref.ref[CodeType]) -> None:
        self._refusals.pop(key, None)

    def result_for(self, callback: Any, frame: Any, flight: _Flight) -> tuple[Any] | None:
        """The answer that another thread's compile has for this call, in a tuple."""
        flight.now("compile")
        code = frame.f_code
        refusal = self._refusals.get(id(code))
        if refusal is not None and refusal[0]() is code and refusal[1] > flight.arrived:
            return (refusal[2],)
        self._unfiled = [pair for pair in self._unfiled if not pair[1].is_over()]
        if _records_more_than_code(callback):
            return None
        entries = sys.modules[_EVALUATOR]._debug_get_cache_entry_list(code)
        entries = [u for of, u in self._unfiled if of() is code] + entries
        if not entries:
            return None
        backend, region, f_locals = _backend_of(callback), _region(), frame.f_locals
        for entry in entries:
            if _fits(entry, backend, region, f_locals):
                return (_used_once(entry),)
        return None


def _used_once(entry: Any) -> Any:
    """An answer that runs the code of `entry` and leaves an entry that never matches."""
    types = sys.modules["torch._dynamo.types"]
    spent = sys.modules[_GUARDS].DeletedGuardManagerWrapper(
        "another thread compiled this specialisation first"
    )
    spent.root = None  # the evaluator takes no guards for guards that fail
    spent._torchcompat_spent = True
    annotation = getattr(entry, "trace_annotation", "Unknown")
    guarded = types.GuardedCode(entry.code, spent, entry.compile_id, annotation)
    wrap = getattr(types, "wrap_guarded_code", None)
    return guarded if wrap is None else wrap(guarded)


def _look_again(function: FunctionType) -> CodeType:
    change = _LookAgainUnderLock()
    code = recompile(function, change.visit)
    if (change.locks, change.compiles) != (1, 1):
        raise SourceDrift(f"{function.__qualname__} compiles in {change.compiles} places")
    return embed(code, {PLACEHOLDER: _Flights()})


class _LookAgainUnderLock(ast.NodeTransformer):
    """Splits the `with` so that the look comes after the lock and before all else."""

    def __init__(self) -> None:
        self.locks = self.compiles = 0
        self._inside = False

    def visit_With(self, node: ast.With) -> Any:
        if not ast.unparse(node).startswith(_UNDER_LOCK):
            return self.generic_visit(node)
        self.locks += 1
        self._inside = True
        self.generic_visit(node)
        self._inside = False
        flight, *look = ast.parse(
            f"with {PLACEHOLDER!r}.flight(frame) as _flight: pass\n"
            f"_found = {PLACEHOLDER!r}.result_for(self, frame, _flight)\n"
            "if _found is not None:\n"
            "    return _found[0]\n"
        ).body
        assert isinstance(flight, ast.With)
        for part in itertools.chain.from_iterable(ast.walk(s) for s in (flight, *look)):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node)
        rest = ast.copy_location(ast.With(node.items[1:], node.body), node)
        flight.body = [ast.copy_location(ast.With(node.items[:1], [*look, rest]), node)]
        return flight

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self._inside or not ast.unparse(node.func).startswith("self._torchdynamo_orig_"):
            return node
        self.compiles += 1
        note = ast.parse(f"{PLACEHOLDER!r}.note(self, frame)").body[0]
        assert isinstance(note, ast.Expr)
        assert isinstance(note.value, ast.Call)
        for part in ast.walk(note):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node)
        note.value.args.append(node)
        return note.value


def _entries(first_or_all: Any) -> list[Any]:
    """A list, or up to 2.12 the first of a chain."""
    if isinstance(first_or_all, list):
        return first_or_all
    chain = []
    while first_or_all:
        chain.append(first_or_all)
        first_or_all = first_or_all.next
    return chain


def _compute_cache_size(original: Any) -> Any:
    def compute_cache_size(frame: Any, entries: Any, *args: Any, **kwargs: Any) -> Any:
        size = original(frame, entries, *args, **kwargs)
        spent = sum(map(_is_spent, _entries(entries)))
        if spent:
            size.num_cache_entries -= spent
            size.num_cache_entries_with_same_id_matched_objs -= spent
            if hasattr(size, "total_cache_entries_all_regions"):
                size.total_cache_entries_all_regions -= spent
        return size

    return compute_cache_size


def _recognise() -> Finding:
    """The evaluator must show an entry's backend, guards and code."""
    entry = sys.modules[_EVALUATOR]._CacheEntry
    for name in ("backend", "guard_manager", "code", "compile_id"):
        if not hasattr(entry, name):
            return Finding("drifted", f"a cache entry does not show its {name}")
    if not hasattr(sys.modules[_GUARDS], "DeletedGuardManagerWrapper"):
        return Finding("drifted", "guards have no mark for an invalidated entry")
    return Finding("ok", "nothing looks for compiled code once the compile lock is had")


PATCH = Patch(
    id="compile_single_flight",
    title="Threads that call a function for the first time must compile it once",
    why=(
        "N threads that make a function's first call together compile it N times, one after the "
        "other, and silently: the start takes N times as long, and from nine threads on the "
        "duplicates fill the function's cache, so that every later shape runs eager for good."
    ),
    affects=">=2.6.0.dev0",
    recognise=_recognise,
    edits=(
        Code(
            target=f"{_CONVERT_FRAME}:CatchErrorsWrapper.__call__",
            factory=_look_again,
            signature=("self", "frame", "cache_entry", "frame_state"),
            anchors=(_UNDER_LOCK,),
        ),
        Wrap(
            target=f"{_CONVERT_FRAME}:compute_cache_size",
            factory=_compute_cache_size,
            anchors=("num_cache_entries_with_same_id_matched_objs += 1",),
        ),
    ),
    requires=("lazy_graph_module",),  # threads now share a graph module from its first call on
    repro="repro/compile_single_flight.py",
    links=("https://github.com/pytorch/pytorch/issues/168042",),
    signs=(
        Sign(  # the guards of the entry fit the call that is compiled: a duplicate
            text=r"torch\._dynamo hit config\.\w+ \(\d+\)(?s:.)*last reason:.*"
            "runtime guards failed even though they passed",
            kind="log",
        ),
        Sign(
            text=r"torch\._dynamo hit config\.\w+ \(\d+\)(?s:.)*last reason:.*"
            "Unable to find recompilation reasons",
            kind="log",
            sure=False,
        ),
    ),
)
