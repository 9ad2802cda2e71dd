"""guard_scope: guards of two threads are built over one dictionary of names.

To evaluate the source of a guard (`L['x'].weight`), torch puts the value of what comes before the
dot under a spare name into the dictionary of the names that guards may use, and deletes it again.
That dictionary is one for the process. Another thread that builds a guard function meanwhile (an
export does so without the compile lock) makes its parameters of the names, and a moment later calls
it with the values: `TypeError: ___make_guard_fn() takes 24 positional arguments but 25 were given`.
Two threads that evaluate sources may take each other's value under the spare name.

Each thread gets a copy of the dictionary.
"""

from __future__ import annotations

import inspect
import sys
import threading
from typing import Any, Final

from torchcompat.patch import Patch, Wrap
from torchcompat.sign import Sign
from torchcompat.verdict import Finding

_GUARDS: Final = "torch._dynamo.guards"
_SPARE: Final = "locals[tmpvar] ="


def _recognise() -> Finding:
    sources: Any = sys.modules["torch._guards"]
    evaluate = getattr(sources.ChainedSource, "get_value", None)
    if evaluate is None or _SPARE not in inspect.getsource(evaluate):
        return Finding("fixed", "sources are evaluated without a spare name")
    return Finding("ok", "sources are evaluated with a spare name in the dictionary of all guards")


def _own_names(original: Any) -> Any:
    own = threading.local()

    def _get_closure_vars() -> dict[str, object]:
        names: dict[str, object] | None = getattr(own, "names", None)
        if names is None:
            names = own.names = dict(original())
        return names

    return _get_closure_vars


PATCH = Patch(
    id="guard_scope",
    title="Guards of two threads must not be built over one dictionary",
    why=(
        "A compile beside an export of another thread raises InternalTorchDynamoError: TypeError: "
        "___make_guard_fn() takes 24 positional arguments but 25 were given."
    ),
    affects=">=2.10.0.dev0",
    recognise=_recognise,
    edits=(
        Wrap(
            target=f"{_GUARDS}:_get_closure_vars",
            factory=_own_names,
            signature=(),
            anchors=("_CLOSURE_VARS",),
        ),
    ),
    repro="repro/guard_scope.py",
    signs=(
        Sign(text=r"___make_guard_fn\(\) takes \d+ positional arguments but \d+ were given"),
        Sign(text=r"___make_guard_fn\(\) missing \d+ required positional arguments?"),
    ),
)
