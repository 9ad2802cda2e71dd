"""fx_patcher: what an FX trace replaces while it runs, it replaces for every thread.

Three faults of one mechanism, in every torch to date:

- `torch.fx._symbolic_trace.CURRENT_PATCHER` is one global. Overlapping traces end in
  `AssertionError: CURRENT_PATCHER is None in finally block` (which hides the first error), and a
  compile in another thread lifts the patches of a trace that is not its own, so that the trace's
  graph silently changes.
- `nn.Module.__call__` and `nn.Module.__getattr__` are the tracer's while it runs: an eager module
  call of another thread raises `NameError: module is not installed as a submodule` or ends up as a
  node in the trace. Restored out of order, a dead tracer's function stays for good.
- Functions replaced in module globals (`math.sqrt`, `torch.fx.wrap`) are taken away by the trace
  that ends first and put back by the one that ends last.

`CURRENT_PATCHER` becomes thread-local. `_Patcher` keeps its interface but no longer assigns: the
two module methods are hooked for the tracing thread alone (`thread_owned`), everything else is
counted (`shared_replacement`). Traces of different threads never wait for each other.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from torchcompat.errors import SourceDrift
from torchcompat.patch import Patch, Replace, Wrap
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

from . import shared_replacement
from .thread_owned import Hook, ThreadOwnedFunction

_TRACE = "torch.fx._symbolic_trace"
_MODULE = "torch.nn.modules.module"


def _module_class() -> Any:
    return sys.modules[_MODULE].Module


def _owned(cls: type, name: str) -> ThreadOwnedFunction | None:
    """The thread-owned function behind `cls.name`, if it is one of nn.Module's two."""
    if cls is not _module_class() or name not in ("__call__", "__getattr__"):
        return None
    # A call on its way is known by its module, an attribute read by module and name.
    return ThreadOwnedFunction.of(vars(cls)[name], key_args=1 if name == "__call__" else 2)


def _recognise() -> Finding:
    """nn.Module's two functions must be plain functions that the hook can be put in front of."""
    for name in ("__call__", "__getattr__"):
        function = vars(_module_class()).get(name)
        if not isinstance(function, FunctionType):
            return Finding("drifted", f"nn.Module.{name} is {type(function).__name__}, no function")
        try:
            ThreadOwnedFunction.of(function, key_args=1 if name == "__call__" else 2)
        except SourceDrift as e:
            return Finding("drifted", str(e))
    return Finding("ok", "nn.Module's __call__ and __getattr__ are process-wide")


class _OwnedRecord:
    """A hook of the tracing thread on one of nn.Module's functions; the shape of `_PatchedFn`."""

    def __init__(self, function: ThreadOwnedFunction, hook: Hook) -> None:
        self.function, self.hook = function, hook
        self.held: list[Hook] | None = None

    def patch(self) -> None:
        if self.held is None:
            self.held = self.function.add(self.hook)

    def revert(self) -> None:
        if self.held is not None:
            self.function.remove(self.held, self.hook)
            self.held = None


class _SharedRecord:
    """One trace's use of a replacement that several traces share; the shape of `_PatchedFn`."""

    def __init__(self, namespace: dict[str, Any] | type, name: str, new: Any) -> None:
        self.namespace, self.name, self.new = namespace, name, new
        self.entry: shared_replacement.Entry | None = None

    def patch(self) -> None:
        if self.entry is None:
            self.entry = shared_replacement.acquire(self.namespace, self.name, self.new)

    def revert(self) -> None:
        if self.entry is not None:
            shared_replacement.release(self.entry)
            self.entry = None


def _patcher_class(original: Any) -> Any:
    class _Patcher(original):  # type: ignore[misc]
        """torch's patcher, except that nothing it does shows in, or depends on, another thread."""

        def patch(
            self, frame_dict: dict[str, Any], name: str, new_fn: Any, deduplicate: bool = True
        ) -> None:
            self._record(_SharedRecord(frame_dict, name, new_fn))

        def patch_method(self, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            function = _owned(cls, name)
            if function is None:
                self._record(_SharedRecord(cls, name, new_fn))
            else:
                self._record(_OwnedRecord(function, new_fn))

        def _record(self, record: _OwnedRecord | _SharedRecord) -> None:
            self.patches_made.append(record)
            record.patch()

    _Patcher.__doc__ = original.__doc__
    return _Patcher


def _autowrap_check(original: Any) -> Any:
    make_wrapper = sys.modules[_TRACE]._create_wrapped_func

    def _autowrap_check(patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
        """Wrap the functions of `function_ids` found in `frame_dict`, also those that another
        trace has wrapped already: this trace must not lose them when the other one ends."""
        if not patcher.visit_once(frame_dict):
            return
        for name, value in list(frame_dict.items()):
            if name.startswith("_") or not callable(value):
                continue
            function = shared_replacement.original_of(frame_dict, name, value)
            if id(function) in function_ids:
                patcher.patch(frame_dict, name, make_wrapper(function))

    return _autowrap_check


def _tracer_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        """A tracer notes the identities of the functions to wrap when it is made. Made while
        another trace has them wrapped, it would note wrappers that are gone when it is used."""
        original(self, *args, **kwargs)
        self._autowrap_function_ids |= shared_replacement.originals_of(self._autowrap_function_ids)

    return __init__


PATCH = Patch(
    id="fx_patcher",
    title="An FX trace must change nn.Module and its globals for its own thread only",
    why=(
        "While one thread traces with FX, nn.Module.__call__ and __getattr__ are the tracer's for "
        "every thread: unrelated eager calls raise 'NameError: module is not installed as a "
        "submodule' or turn up as nodes in the graph. Overlapping traces raise 'CURRENT_PATCHER is "
        "None in finally block', and a dead tracer's function can stay on nn.Module for good. A "
        "compile in another thread silently changes a running trace's graph."
    ),
    affects=">=2.6.0.dev0",
    recognise=_recognise,
    edits=(
        ThreadLocal(module=_TRACE, name="CURRENT_PATCHER", default=None),
        Wrap(
            target=f"{_TRACE}:Tracer.__init__",
            factory=_tracer_init,
            anchors=("self._autowrap_function_ids: ",),
        ),
        Replace(
            target=f"{_TRACE}:_Patcher",
            factory=_patcher_class,
            anchors=("self.patches_made", "self.visited", "def patch_method(", "_PatchedFnSetAttr"),
        ),
        Replace(
            target=f"{_TRACE}:_autowrap_check",
            factory=_autowrap_check,
            signature=("patcher", "frame_dict", "function_ids"),
            anchors=("patcher.visit_once(frame_dict)", "_create_wrapped_func(value)"),
        ),
    ),
    repro="repro/fx_patcher.py",
    links=(
        "https://github.com/pytorch/pytorch/issues/112775",
        "https://github.com/pytorch/pytorch/issues/168042",
        "https://github.com/pytorch/pytorch/pull/187589",
    ),
    signs=(
        Sign(text="CURRENT_PATCHER is None in finally block"),
        Sign(text="CURRENT_PATCHER was changed during a revert_all_patches"),
        Sign(  # up to 2.10 without a text
            text=r"^AssertionError:?$",
            raised_in="torch/fx/_symbolic_trace.py:_new_patcher",
            source="CURRENT_PATCHER is not None",
        ),
        Sign(  # another thread's trace has taken this one's hooks
            text="NameError: module is not installed as a submodule",
            frames=("torch/fx/_symbolic_trace.py:module_call_wrapper",),
            in_thread=True,
            sure=False,
        ),
        Sign(
            text="NameError: module is not installed as a submodule",
            frames=("torch/fx/_symbolic_trace.py:module_call_wrapper|call_module|path_of_module",),
            absent=(
                "torch/fx/_symbolic_trace.py:trace",
            ),  # a trace of one's own may say so rightly
        ),
    ),
)
