"""dynamo_reset: `torch._dynamo.reset()` frees compiled code under the threads that run it.

Every torch to date: the C evaluator holds a raw pointer to a code object's cache while it checks
guards and while it calls the compiler. `reset()`, `reset_code_caches()` and `remove_from_cache()`
free that cache; the compile lock that they take keeps compiles out, not calls. A thread in either
place then crashes the process, with a segmentation fault or an arithmetic one.

The three functions keep their identity and get code that first closes a gate (`call_gate`): new
compiled calls wait, those under way are waited for, and where they do not end the function refuses
with an error instead of freeing anything. Calls cost nothing more than before.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final

from torchcompat.patch import Code, Patch, Wrap
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

from . import call_gate

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"
_gates: dict[int, call_gate.CallGate] = {}


def _places() -> set[call_gate.Place]:
    context = sys.modules[_EVAL_FRAME]._TorchDynamoContext
    return call_gate.wrapper_places(inspect.unwrap(context.__call__).__code__)


def _gate() -> call_gate.CallGate:
    """The process's one gate: the three functions must not pass each other by."""
    return _gates.setdefault(0, call_gate.CallGate(_places()))


def _behind_the_gate(purpose: str) -> Callable[[FunctionType], CodeType]:
    def factory(function: FunctionType) -> CodeType:
        def change(node: ast.FunctionDef) -> ast.FunctionDef:
            documented = ast.get_docstring(node) is not None
            first = node.body[1 if documented else 0]
            text = f"with {PLACEHOLDER!r}.closed({purpose!r}):\n  pass"
            gated: Any = ast.parse(text).body[0]
            for part in ast.walk(gated):
                if hasattr(part, "lineno"):
                    ast.copy_location(part, first)
            gated.body = node.body[int(documented) :]
            node.body[int(documented) :] = [gated]
            return node

        return embed(recompile(function, change), {PLACEHOLDER: _gate()})

    return factory


def _clear(original: Any) -> Any:
    def clear(self: Any) -> None:
        """Without the assertion, from 2.8 on, that nothing is being compiled: another thread's
        backward or export may be, beside the gate, and loses nothing. Compiles of this thread have
        been refused before."""
        try:
            original(self)
        except AssertionError:
            if self.start_callbacks or self.end_callbacks:
                raise

    return clear


def _recognise() -> Finding:
    """Compiled calls must be visible on a stack, and begin where the gate can be put."""
    if not callable(vars(sys.modules[_EVAL_FRAME]).get("_callback_from_stance")):
        return Finding("drifted", "compiled calls no longer begin with _callback_from_stance")
    if not _places():
        return Finding("drifted", "the wrapper of compiled functions is not to be found")
    lock = sys.modules["torch._dynamo.convert_frame"].compile_lock
    if not hasattr(lock, "_is_owned"):
        return Finding("drifted", "the compile lock does not tell whose it is")
    return Finding("ok", "reset() frees compiled code without asking who runs it")


PATCH = Patch(
    id="dynamo_reset",
    title="torch._dynamo.reset() must not free code that another thread is running",
    why=(
        "torch._dynamo.reset() in one thread frees the caches that other threads' compiled calls "
        "are reading: the process dies of a segmentation fault or SIGFPE, or calls fail with "
        "errors from half-reset state."
    ),
    affects=">=2.6.0.dev0",
    recognise=_recognise,
    edits=(
        Code(
            target="torch._dynamo:reset",
            factory=_behind_the_gate("torch._dynamo.reset()"),
            signature=(),
            anchors=("convert_frame.compile_lock", "reset_code_caches()"),
        ),
        Code(
            target="torch._dynamo:reset_code_caches",
            factory=_behind_the_gate("torch._dynamo.reset_code_caches()"),
            signature=(),
            anchors=("convert_frame.compile_lock", "reset_code(code)"),
        ),
        Code(
            target=f"{_EVAL_FRAME}:remove_from_cache",
            factory=_behind_the_gate("remove_from_cache()"),
            signature=("f",),
            anchors=("reset_code(f.__code__)",),
        ),
        Wrap(
            target="torch._dynamo.callback:CompilationCallbackHandler.clear",
            factory=_clear,
            signature=("self",),
            anchors=("self.start_callbacks.clear()", "self.end_callbacks.clear()"),
        ),
    ),
    repro="repro/dynamo_reset.py",
    links=("https://github.com/pytorch/pytorch/issues/193697",),
    signs=(
        Sign(text=r"^AssertionError: Cannot clear callbacks while \d+ are pending"),
        Sign(
            text=r"^Fatal Python error: (?:Segmentation fault|Floating[ -]point exception|Aborted)",
            kind="dump",
            frames=(
                "torch/_dynamo/__init__.py|torch/_dynamo/eval_frame.py"
                ":reset|reset_code_caches|remove_from_cache",
            ),
        ),
    ),
)
