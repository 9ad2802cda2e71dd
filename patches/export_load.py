"""export_load: loading an exported program is one global away from loading two.

`torch.export.load` keeps the deserializer at work in `torch._export.serde.serialize.
_CURRENT_DESERIALIZER`, in every torch to date. A second thread that loads meanwhile raises
`AssertionError: _CURRENT_DESERIALIZER is already set`; or it begins as the first one ends, and then
a tensor's metadata is read with "Need access to current deserializer state" or by the wrong one.

The global becomes thread-local.
"""

from __future__ import annotations

from torchcompat.patch import Patch
from torchcompat.rewrite import ThreadLocal
from torchcompat.sign import Sign

PATCH = Patch(
    id="export_load",
    title="Threads must be able to load exported programs at the same time",
    why=(
        "torch.export.load in a second thread raises '_CURRENT_DESERIALIZER is already set' while "
        "the first is at it."
    ),
    affects=">=2.6.0.dev0",
    edits=(
        ThreadLocal(
            module="torch._export.serde.serialize", name="_CURRENT_DESERIALIZER", default=None
        ),
    ),
    repro="repro/export_load.py",
    links=("https://github.com/pytorch/pytorch/issues/195099",),
    signs=(
        Sign(text="_CURRENT_DESERIALIZER is already set"),
        Sign(text="Need access to current deserializer state"),
        Sign(  # up to 2.10 without a text
            text=r"^AssertionError:?$",
            raised_in="torch/_export/serde/serialize.py:deserialize",
            source="_CURRENT_DESERIALIZER is None",
        ),
    ),
)
