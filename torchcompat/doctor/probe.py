"""What needs torch to be imported. Runs as a program of its own, so that a torch that crashes or
hangs cannot take the doctor with it: `python -m torchcompat.doctor.probe [MODULE…]` imports the
modules named, then prints one line of JSON behind a mark.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Final

MARK: Final = "torchcompat doctor: "
# Decorators that torch itself uses leave their file's functions in front of torch's own.
_TORCHS_OWN: Final = ("torch", "typing_extensions")


def devices(torch: Any) -> list[str]:
    """One line for each device that torch can use."""
    lines = [f"cpu: {torch.get_num_threads()} threads"]
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        count = module.device_count() if module is not None and module.is_available() else 0
        for i in range(count):
            properties = module.get_device_properties(i)
            memory = getattr(properties, "total_memory", 0) / (1 << 30)
            lines.append(f"{kind}:{i}: {properties.name}, {memory:.0f} GiB")
    mps = getattr(torch.backends, "mps", None)
    return lines + ["mps"] * bool(mps is not None and mps.is_available())


def foreign(patches: Iterable[Any]) -> list[dict[str, str]]:
    """Functions that our patches are about and that are not torch's any more: who has them."""
    found = []
    for patch in patches:
        for target in dict.fromkeys(_targets(patch.edits)):
            try:
                _, _, value = target.resolve()
            except Exception:  # noqa: BLE001 - not in this torch: the patch's verdict says so
                continue
            file = _foreign_file(value)
            if file is not None:
                found.append({"patch": patch.id, "target": str(target), "file": file})
    return found


def _targets(edits: Iterable[Any]) -> Iterator[Any]:
    for edit in edits:
        if hasattr(edit, "place"):
            yield edit.place
        yield from _targets(getattr(edit, "edits", ()))


def _foreign_file(value: Any) -> str | None:
    """The file of the outermost function around, or instead of, torch's that is not torch's."""
    from torchcompat.target import unbind

    link = unbind(value)[0]
    for _ in range(64):
        file = _file(link)
        if file is not None and not _is_torchs(file):
            return file
        link = getattr(link, "__wrapped__", None)
        if link is None:
            return None
    return None


def _file(value: Any) -> str | None:
    if isinstance(value, FunctionType):
        return value.__code__.co_filename
    wrapper = getattr(value, "_self_wrapper", None)  # wrapt's proxies look like what they wrap
    if wrapper is not None:
        return _file(inspect.unwrap(wrapper))
    if isinstance(value, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None)
    return None


def _is_torchs(file: str) -> bool:
    if not Path(file).is_file():
        return True  # "<string>", as of namedtuple: nobody can be named
    standard = Path(sysconfig.get_path("stdlib"))
    path = Path(file)
    if standard in path.parents and "site-packages" not in path.parts:
        return True
    folders = [Path(m.__file__ or "").parent for n in ("torch",) if (m := sys.modules.get(n))]
    return any(f in path.parents for f in folders) or path.stem in _TORCHS_OWN


def look(modules: list[str]) -> dict[str, Any]:
    """Everything, as it is before and after `apply()`. `modules` are imported first."""
    torch = importlib.import_module("torch")
    result: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    result["devices"] = devices(torch)
    result["not_imported"] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as e:  # noqa: BLE001 - it is what the doctor is asked about
            result["not_imported"][name] = f"{type(e).__name__}: {e}"
    import torchcompat
    from torchcompat.engine import ENGINE
    from torchcompat.prove import fresh_plan

    plan = fresh_plan()
    known = [ENGINE.registered(v.patch_id) for v in plan if v.state.value != "failed"]
    result["foreign"] = foreign(r.patch for r in known)
    torchcompat.apply(strict=False)
    result["report"] = torchcompat.status().to_dict()
    return result


if __name__ == "__main__":
    print(MARK + json.dumps(look(sys.argv[1:])), flush=True)
