"""lazy_backward: the first backward of a graph compiles it, and nobody checks who else does.

A compiled forward may leave its backward to be compiled when it first runs. Every torch to date
asks "is it compiled?" and then compiles, with nothing in between: threads whose first backward of
one graph comes at the same time (autograd has one worker per device; servers run several
`backward()` calls) compile it once each. They share one saved `TracingContext` meanwhile, whose
bucket count and metadata each of them changes.

The compile is put under a lock of that context, and the question is asked again inside. Up to
2.11 the place is in the middle of the backward that `AOTDispatchAutograd.post_compile` defines,
so that function is recompiled with the lock in it; from 2.12 it is a method that can be wrapped.

A thread never waits where waiting could close a circle: when it already compiles a backward, or
holds Dynamo's compile lock, which the compile that it would wait for needs. It then does what
stock torch does.
"""

from __future__ import annotations

import ast
import sys
import threading
import weakref
from types import CodeType, FunctionType, TracebackType
from typing import Any, Final

from torchcompat.activity import Doing
from torchcompat.choice import FirstOf
from torchcompat.errors import SourceDrift
from torchcompat.patch import Code, Patch, Wrap
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign

_WRAPPERS: Final = "torch._functorch._aot_autograd.runtime_wrappers"
_ASKED: Final = "CompiledFunction.compiled_bw is None"


class _Depth(threading.local):
    value = 0


_depth = _Depth()
_guard = threading.Lock()
# Graphs of one Dynamo compile share their context, so the lock belongs to the context. Weak: a
# compiled function that is dropped takes its lock along.
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


def _lock_of(info: Any) -> threading.RLock:
    context = getattr(info, "saved_context", None)
    key = context if context is not None else getattr(info, "bw_module", _guard)
    with _guard:
        lock = _locks.get(key)
        if lock is None:
            lock = _locks[key] = threading.RLock()
        return lock


def _described(info: Any) -> str:
    """Which graph a backward is of, for `torchcompat.threads`: its function, and torch's number."""
    codes = getattr(getattr(info, "saved_context", None), "traced_code", None) or ()
    names = [f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" for code in codes[:1]]
    compiled = getattr(getattr(info, "saved_compile_context", None), "compile_id", None)
    return " ".join([*names, *([] if compiled is None else [f"[{compiled}]"])]) or "a graph"


def _may_wait() -> bool:
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    compile_lock = getattr(convert_frame, "compile_lock", None)
    return not _depth.value and (compile_lock is None or not compile_lock._is_owned())


class _OneAtATime:
    """While inside, no other thread compiles a backward with the same saved context."""

    def __init__(self, info: Any) -> None:
        self._lock = _lock_of(info)
        self._held = False
        self._doing = Doing("wait_backward", _described(info), self._lock)

    def __enter__(self) -> None:
        self._doing.__enter__()
        try:
            self._held = self._lock.acquire(blocking=_may_wait())
        except BaseException:  # Ctrl-C
            self._doing.__exit__(None, None, None)
            raise
        self._doing.now("backward")
        _depth.value += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _depth.value -= 1
        if self._held:
            self._lock.release()
        self._doing.__exit__(None, None, None)


class _Gate:
    """What the recompiled code holds as a constant."""

    one_at_a_time = _OneAtATime


def _get_or_compile(original: Any) -> Any:
    def get_or_compile(self: Any, *, saved_tensors_use_once: bool) -> Any:
        if self.compiled_bw is not None:
            return self.compiled_bw
        with _OneAtATime(self.lazy_backward_info):
            return original(self, saved_tensors_use_once=saved_tensors_use_once)

    return get_or_compile


class _AskAgainUnderLock(ast.NodeTransformer):
    """`if asked: compile` -> `if asked: with the lock: if asked: compile`."""

    def __init__(self) -> None:
        self.found = 0

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.test) != _ASKED:
            return node
        self.found += 1
        template = f"with {PLACEHOLDER!r}.one_at_a_time(lazy_backward_info):\n  pass"
        locked = ast.parse(template).body[0]
        assert isinstance(locked, ast.With)
        for part in ast.walk(locked):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node)
        locked.body = [ast.copy_location(ast.If(node.test, node.body, []), node)]
        return ast.copy_location(ast.If(node.test, [locked], node.orelse), node)


def _post_compile(function: FunctionType) -> CodeType:
    change = _AskAgainUnderLock()
    code = recompile(function, change.visit)
    if change.found != 1:
        raise SourceDrift(f"{function.__qualname__} asks {change.found} times if {_ASKED}")
    return embed(code, {PLACEHOLDER: _Gate})


PATCH = Patch(
    id="lazy_backward",
    title="Threads that run the first backward of one graph must compile it once",
    why=(
        "The first backward of a compiled graph compiles it without any lock: threads that come at "
        "the same time each compile it, and change one shared tracing context while they do. Time "
        "and memory are lost silently; under DDP buckets are counted twice and raise 'expected "
        "same # of fw and bw compiles'."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        FirstOf(
            edits=(
                Wrap(
                    target=f"{_WRAPPERS}:_AutogradBackwardCompiler.get_or_compile",
                    factory=_get_or_compile,
                    signature=("self", "saved_tensors_use_once"),
                    anchors=("self.compiled_bw is not None", "self.lazy_backward_info"),
                ),
                Code(
                    target=f"{_WRAPPERS}:AOTDispatchAutograd.post_compile",
                    factory=_post_compile,
                    anchors=(f"if {_ASKED}:", "lazy_backward_info.saved_context"),
                ),
            )
        ),
    ),
    repro="repro/lazy_backward.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/105943",
        "https://github.com/pytorch/pytorch/issues/140626",
    ),
    signs=(Sign(text="expected same # of fw and bw compiles, but found bucket"),),
)
