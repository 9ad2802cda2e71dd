"""data_parallel: a replica of a compiled module destroys the original, or uses its weights.

`nn.parallel.replicate` copies a module's shell with `_replicate_for_data_parallel` and gives the
copy the other device's weights. The wrapper that `torch.compile(module)` returns forwards every
assignment to the module inside, so that to replicate it empties the *original*'s tables and ends in
a recursion; and the replica of a module that was compiled in place, `module.compile()`, keeps the
compiled call of the original, silently, and answers with the original's weights.

The wrapper gets a `_replicate_for_data_parallel` of its own, which leaves the original alone and
compiles the replica's module at its first call; a replica of a module compiled in place gets a
compiled call of its own, made by the same compiler. All replicas run one code object, so they share
what is compiled.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any, Final

from torchcompat.patch import Patch, Value, Wrap
from torchcompat.sign import Sign

_EVAL_FRAME: Final = "torch._dynamo.eval_frame"


def _of_wrapper(_: Any) -> Any:
    def _replicate_for_data_parallel(self: Any) -> Any:
        """A wrapper around whatever module becomes its `_orig_mod`; like `nn.Module`'s method."""
        replica: Any = object.__new__(type(self))
        table = dict(vars(self))
        table["_parameters"] = {}
        table["_buffers"] = dict(table["_buffers"])
        table["_modules"] = dict(table["_modules"])
        table["_is_replica"] = True

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Not before the first call: replicate() sets the module inside after this.
            replica._initialize()
            return replica.forward(*args, **kwargs)

        table["forward"] = forward
        object.__setattr__(replica, "__dict__", table)
        return replica

    return _replicate_for_data_parallel


def _compiler_of(compiled: Any) -> Any:
    """The context that made a compiled function, which compiles another one alike; or None."""
    context = sys.modules[_EVAL_FRAME]._TorchDynamoContext
    function = compiled
    while isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                if isinstance(cell.cell_contents, context):
                    return cell.cell_contents
            except ValueError:  # an empty cell
                continue
        function = getattr(function, "__wrapped__", None)
    return None


def _of_module(original: Any) -> Any:
    def _replicate_for_data_parallel(self: Any) -> Any:
        replica = original(self)
        compiled = vars(replica).get("_compiled_call_impl")
        if compiled is not None:
            compiler = _compiler_of(compiled)
            if compiler is None:
                warnings.warn(
                    f"a replica of {type(self).__name__}, which is compiled in place, runs "
                    "eagerly: its compiler cannot be told (torchcompat, data_parallel)",
                    stacklevel=2,
                )
                replica._compiled_call_impl = None
            else:
                replica._compiled_call_impl = compiler(replica._call_impl)
        return replica

    return _replicate_for_data_parallel


PATCH = Patch(
    id="data_parallel",
    title="Replicas of a compiled module must use their own weights and leave the original alone",
    why=(
        "nn.DataParallel over torch.compile(module) empties the original module and ends in a "
        "RecursionError; over module.compile() every replica silently computes with the "
        "original's weights."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Value(
            target=f"{_EVAL_FRAME}:OptimizedModule._replicate_for_data_parallel",
            factory=_of_wrapper,
            create=True,
        ),
        Wrap(
            target="torch.nn.modules.module:Module._replicate_for_data_parallel",
            factory=_of_module,
            signature=("self",),
            anchors=("replica.__dict__ = self.__dict__.copy()",),
        ),
    ),
    signs=(
        Sign(
            text="RecursionError: maximum recursion depth exceeded",
            frames=("torch/nn/parallel/parallel_apply.py:_worker",),
            elsewhere="torch/_dynamo/",
        ),
    ),
    repro="repro/data_parallel.py",
    links=("https://github.com/pytorch/pytorch/issues/94636",),
)
