"""What a test can leave behind in torch and in the import system, and what it has left."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

_PATCHED_FUNCTIONS: Final = ("__call__", "__getattr__", "__setattr__")
_FLAGS: Final = (
    ("torch.fx._symbolic_trace", "_is_fx_tracing_flag"),
    ("torch.fx._symbolic_trace", "CURRENT_PATCHER"),
    ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER"),
    ("torch.utils._python_dispatch", "_is_in_torch_dispatch_mode"),
    ("torch.utils._python_dispatch", "_is_in_non_infra_torch_dispatch_mode"),
    ("torch.utils._python_dispatch", "_is_in_any_mode_without_ignore_compile_internals"),
    ("torch.compiler", "_is_compiling_flag"),
    ("torch.compiler", "_is_exporting_flag"),
)
_STACKS: Final = ("_len_torch_dispatch_stack", "_len_torch_function_stack")


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment, of the thread that took it. Imports nothing: what is not loaded can
    not be changed. `flags` maps what to its value, False where its module is not there yet."""

    patches: frozenset[str]
    functions: dict[str, tuple[Any, Any]] | None
    flags: dict[str, Any]
    finders: tuple[Any, ...]
    modules: frozenset[str]


def snapshot() -> Snapshot:
    return Snapshot(
        _patches(), _functions(), _flags(), tuple(sys.meta_path), frozenset(sys.modules)
    )


def left_since(before: Snapshot) -> list[str]:
    """One line for each thing that is not as it was."""
    now = snapshot()
    found = []
    if added := sorted(now.patches - before.patches):
        found.append(f"patches applied: {', '.join(added)} (use `with torchcompat.applied():`)")
    if gone := sorted(before.patches - now.patches):
        found.append(f"patches taken away: {', '.join(gone)}")
    for name, functions in (now.functions or {}).items():
        if _is_patched(name, functions, before.functions):
            found.append(f"nn.Module.{name} is {_described(functions[0])}")
    for name, value in now.flags.items():
        if value and value != before.flags.get(name, False):
            found.append(f"{name} is {value!r}")
    for finder in now.finders:
        known = any(finder is other for other in before.finders)
        if not known and not _comes_with_its_module(finder, before):
            found.append(f"sys.meta_path holds {_described(finder)}")
    return found


def _patches() -> frozenset[str]:
    engine = getattr(sys.modules.get("torchcompat.engine"), "ENGINE", None)
    return frozenset() if engine is None else frozenset(engine.active())


def _functions() -> dict[str, tuple[Any, Any]] | None:
    """Of nn.Module each function and its code; None before torch is there."""
    cls = getattr(sys.modules.get("torch.nn.modules.module"), "Module", None)
    if cls is None:
        return None
    found = {name: vars(cls).get(name) for name in _PATCHED_FUNCTIONS}
    return {name: (value, getattr(value, "__code__", None)) for name, value in found.items()}


def _is_patched(name: str, now: tuple[Any, Any], before: dict[str, tuple[Any, Any]] | None) -> bool:
    if before is not None:
        return any(a is not b for a, b in zip(now, before[name], strict=True))
    # The test itself has imported torch: what is torch's own comes from its file.
    home = getattr(sys.modules["torch.nn.modules.module"], "__file__", None)
    return getattr(now[1], "co_filename", home) != home


def _flags() -> dict[str, Any]:
    """What is only set while something is under way, by its name."""
    found: dict[str, Any] = {}
    for module, name in _FLAGS:
        value = getattr(sys.modules.get(module), name, None)
        found[f"{module}.{name}"] = value if isinstance(value, bool) else value is not None
    asks = getattr(sys.modules.get("torch.fx._symbolic_trace"), "is_fx_tracing", None)
    if asks is not None:
        found["torch.fx._symbolic_trace.is_fx_tracing()"] = bool(asks())
    c = sys.modules.get("torch._C")
    for name in _STACKS:
        length = getattr(c, name, None)
        found[f"torch._C.{name}()"] = 0 if length is None else length()
    return found


def _comes_with_its_module(finder: Any, before: Snapshot) -> bool:
    """Whether the finder was put there by a module that was first imported meanwhile, as `six`
    does: that is no more a leak than the import is. Ours waits for a pending patch's modules, and
    is one; what finds our patches in a checkout is none."""
    module = str(getattr(finder, "__module__", None) or type(finder).__module__)
    if module.startswith("torchcompat."):
        return module != "torchcompat.hooks"
    return module not in before.modules


def _described(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__module__}.{value.__qualname__} of {code.co_filename}"
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
