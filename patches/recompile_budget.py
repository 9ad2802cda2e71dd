"""recompile_budget: eight compiles are for everybody who shares a code object.

Every torch to date keeps compiled code and its limit (`recompile_limit`, 8) at the code object.

- Threads, devices, grad and autocast modes and all instances of one module class share the eight.
  Whoever comes too late runs eager from then on, with one line in the log, or raises
  `FailOnRecompileLimitHit` under `fullgraph=True`.
- Everything that `torch.compile` takes but cannot trace as a frame (`nn.Sequential` and other
  modules of torch, builtins) runs through one function `inner`: unrelated models of one process
  share its code, and its eight.

`compute_cache_size` no longer counts entries of another situation: other devices, other modes,
another module instance, another live thread. `accumulated_recompile_limit` (256) still counts all,
so growth stays bounded; entries of threads that have ended count for everybody, so that a thread
per request is no way around the limit. `wrap_inline` gives each wrapped object code of its own.

Where a limit is truly reached, `recompile_limit` says so: a warning once for each function and
module, or an error from the call if `on_recompile_limit` is "error".
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat.choice import FirstOf
from torchcompat.patch import Patch, Wrap
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

from .recompile_limit import compiling, keep_last_reason, tell_when_exceeded

_CONVERT_FRAME: Final = "torch._dynamo.convert_frame"
_EXTERNAL: Final = "torch._dynamo.external_utils"


@dataclass(frozen=True)
class _Situation:
    """What a compile was for, beyond the shapes of its inputs."""

    owner: weakref.ref[Any] | None
    devices: frozenset[str]
    modes: tuple[Any, ...]
    thread: int

    def counts_for(self, other: _Situation, alive: frozenset[int]) -> bool:
        """Whether a compile for `self` uses up what `other` may have."""
        owner, others = (s.owner and s.owner() for s in (self, other))
        return (
            (self.devices, self.modes) == (other.devices, other.modes)
            and (owner is not None or self.owner is None)  # else nothing can match it any more
            and owner is others
            and (self.thread == other.thread or self.thread not in alive)
        )


def _tensors(values: Any, depth: int = 2) -> Iterator[Any]:
    tensor = sys.modules["torch"].Tensor
    for value in values:
        if isinstance(value, tensor):
            yield value
        elif depth and isinstance(value, (tuple, list)):
            yield from _tensors(value, depth - 1)
        elif depth and isinstance(value, dict):
            yield from _tensors(value.values(), depth - 1)


def _modes() -> tuple[Any, ...]:
    torch: Any = sys.modules["torch"]
    devices = ("cpu", torch._C._get_accelerator().type)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    )


def _situation(frame: Any) -> _Situation:
    f_locals = frame.f_locals
    module = sys.modules["torch"].nn.Module
    # `fn` is what wrap_inline's function calls
    owner = next((f_locals[n] for n in ("self", "fn") if isinstance(f_locals.get(n), module)), None)
    return _Situation(
        None if owner is None else weakref.ref(owner),
        frozenset(str(t.device) for t in _tensors(f_locals.values())),
        _modes(),
        threading.get_ident(),
    )


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
    has_same_objects = sys.modules["torch._dynamo.cache_size"]._has_same_id_matched_objs

    def compute_cache_size(frame: Any, entries: Any, *args: Any, **kwargs: Any) -> Any:
        size = original(frame, entries, *args, **kwargs)
        if size.num_cache_entries_with_same_id_matched_objs > 1:
            mine = _situation(frame)
            alive = frozenset(t.ident for t in threading.enumerate() if t.ident is not None)
            for entry in _entries(entries):
                theirs = getattr(entry.guard_manager, "_torchcompat_situation", None)
                if theirs is None or theirs.counts_for(mine, alive):
                    continue
                if has_same_objects(frame, entry):  # only those were counted
                    size.num_cache_entries_with_same_id_matched_objs -= 1
        return size

    return compute_cache_size


def _compile(original: Any) -> Any:
    signature = inspect.signature(original)

    def _compile(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        frame = given.get("frame")
        situation = None if frame is None else _situation(frame)
        owner = None if situation is None else situation.owner
        with compiling(given["code"], None if owner is None else owner()):
            result = original(*args, **kwargs)
        # 2.6 answers with the code itself
        guarded = getattr(result, "guarded_code", result)
        manager = getattr(guarded, "guard_manager", None)
        if situation is not None and manager is not None:
            manager._torchcompat_situation = situation
        return result

    return _compile


_codes: dict[tuple[int, str], tuple[weakref.ref[Any], CodeType]] = {}
_codes_lock = threading.Lock()


def _own_code(wrapped: Any, shared: CodeType) -> CodeType:
    """A copy of `shared` for `wrapped`; always the same one, so that wrapping an object again finds
    what is compiled already."""
    owner, name = getattr(wrapped, "__self__", None), getattr(wrapped, "__name__", "")
    if owner is None or inspect.ismodule(owner):  # builtins have their module for __self__
        owner, name = wrapped, ""
    key = (id(owner), name)
    try:
        gone = weakref.ref(owner, lambda _: _codes.pop(key, None) and None)
    except TypeError:
        return shared
    with _codes_lock:
        known = _codes.get(key)
        if known is None or known[0]() is not owner:
            # replace() without a change gives the same object back on some Pythons
            known = _codes[key] = (gone, shared.replace(co_varnames=shared.co_varnames))
        return known[1]


def _wrap_inline(original: Any) -> Any:
    def wrap_inline(fn: Any) -> Any:
        inner = original(fn)
        if isinstance(inner, FunctionType):
            inner.__code__ = _own_code(fn, inner.__code__)
        return inner

    return wrap_inline


def _recognise() -> Finding:
    cache_size = sys.modules["torch._dynamo.cache_size"]
    size = getattr(cache_size, "CacheSizeRelevantForFrame", None)
    fields = getattr(size, "__dataclass_fields__", {})
    if "num_cache_entries_with_same_id_matched_objs" not in fields:
        return Finding("drifted", "the size of a cache is counted in another way")
    if not hasattr(cache_size, "_has_same_id_matched_objs"):
        return Finding("drifted", "which entries are counted is decided elsewhere")
    return Finding("ok", "the recompile limit counts everybody's entries on a code object")


PATCH = Patch(
    id="recompile_budget",
    title="Threads, devices and modules must not use up each other's recompile limit",
    why=(
        "All users of a code object share one limit of eight compiles: threads with shapes or "
        "modes of their own, replicas on other devices, every instance of a module class, and "
        "every model that torch.compile wraps in its one helper function. Who comes late runs "
        "eager from then on, with no more than a line in the log."
    ),
    affects=">=2.6.0.dev0",
    recognise=_recognise,
    edits=(
        Wrap(
            target=f"{_CONVERT_FRAME}:compute_cache_size",
            factory=_compute_cache_size,
            anchors=("num_cache_entries_with_same_id_matched_objs += 1",),
        ),
        Wrap(
            target=f"{_CONVERT_FRAME}:_compile",
            factory=_compile,
            anchors=("exceeds_", "cache_size,"),
        ),
        FirstOf(
            edits=tuple(
                Wrap(
                    target=f"{_CONVERT_FRAME}:{name}",
                    factory=tell_when_exceeded,
                    signature=("cache_size", "compile_id"),
                    anchors=("will_compilation_exceed_specific_limit",),
                )
                for name in ("exceeds_recompile_limit", "exceeds_cache_size_limit")
            )
        ),
        FirstOf(
            edits=tuple(
                Wrap(target=f"{_CONVERT_FRAME}:{name}", factory=keep_last_reason)
                for name in (
                    "get_and_maybe_log_recompilation_reasons",
                    "get_and_maybe_log_recompilation_reason",
                )
            )
        ),
        Wrap(
            target=f"{_EXTERNAL}:wrap_inline",
            factory=_wrap_inline,
            signature=("fn",),
            anchors=("return fn(*args, **kwargs)",),
        ),
    ),
    repro="repro/recompile_budget.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/124269",
        "https://github.com/pytorch/pytorch/issues/178351",
    ),
    signs=(
        Sign(
            text=r"torch\._dynamo hit config\.\w+ \(\d+\)(?s:.)*function: 'inner' "
            r"\(.*torch[/\\]_dynamo[/\\]external_utils\.py",
            kind="log",
        ),
        Sign(  # modes of a thread, modules of one class, devices
            text=r"torch\._dynamo hit config\.\w+ \(\d+\)(?s:.)*last reason:.*(?:"
            r"GLOBAL_STATE changed: (?!num_threads)|___check_obj_id\(|device index mismatch"
            r"|___check_type_id\()",
            kind="log",
        ),
        Sign(text=r"FailOnRecompileLimitHit: ", in_thread=True, sure=False),
    ),
)
