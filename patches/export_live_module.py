"""export_live_module: an export changes the module that other threads go on using.

`torch.export.export(module)` puts fake tensors in the place of the live module's parameters and
buffers while it traces. Another thread that calls the module meanwhile gets a `FakeTensor` back, or
an error about mixing fake and real tensors; one that trains it changes what the export sees.

While other threads are alive the export traces a copy of the module instead: every submodule and
attribute copied, every tensor the very same object, so that the exported program holds the same
parameters. A module that cannot be copied is exported as it is, with a warning.
"""

from __future__ import annotations

import copy
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Final

from torchcompat.patch import Patch, Wrap

#: The tables of `nn.Module` that a call of it looks at.
_CALL_HOOKS: Final = re.compile(r"_(?:forward|backward)_(?:pre_)?hooks\w*")


def _tensors(module: Any) -> Iterator[Any]:
    """All tensors that the module's parts have in their tables or as plain attributes."""
    tensor = sys.modules["torch"].Tensor
    for part in module.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(value, tensor):
                yield value


def copied(module: Any) -> Any:
    """A copy with the same tensors, or `module` itself, with a warning, if it cannot be had."""
    memo = {id(tensor): tensor for tensor in _tensors(module)}
    try:
        copy_of_it = copy.deepcopy(module, memo)
        _complete(module, memo)
    except Exception as e:  # noqa: BLE001 - locks, handles, anybody's __deepcopy__
        warnings.warn(
            f"{type(module).__name__} cannot be copied ({type(e).__name__}: {e}), so that it is "
            "exported in place: other threads must not use it meanwhile "
            "(torchcompat, export_live_module)",
            stacklevel=4,
        )
        return module
    return copy_of_it


def _complete(module: Any, memo: dict[int, Any]) -> None:
    """Copy what torch leaves out of a copied GraphModule: hooks of calls, and plain attributes that
    the graph does not name. What an exported program checks of its inputs is made of these."""
    for part in module.modules():
        twin = vars(memo[id(part)]) if id(part) in memo else {}
        for name, value in vars(part).items():
            if name not in twin or (_CALL_HOOKS.fullmatch(name) and value and not twin[name]):
                twin[name] = copy.deepcopy(value, memo)


def _export(original: Any) -> Any:
    def _export(mod: Any, *args: Any, **kwargs: Any) -> Any:
        nn: Any = sys.modules["torch.nn"]
        if threading.active_count() > 1 and isinstance(mod, nn.Module):
            mod = copied(mod)
        return original(mod, *args, **kwargs)

    return _export


PATCH = Patch(
    id="export_live_module",
    title="An export must leave the module alone that other threads use",
    why=(
        "While one thread exports a module its parameters are fake tensors for everybody: a call "
        "in another thread returns a FakeTensor, or fails, as a server that exports in the "
        "background does."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        Wrap(
            target="torch.export._trace:_export",
            factory=_export,
            anchors=("mod: torch.nn.Module,", "original_state_dict"),
        ),
    ),
    repro="repro/export_live_module.py",
)
