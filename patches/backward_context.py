"""backward_context: two compiled backwards of one `backward()` cannot run at the same time.

From torch 2.12 on `backward()` hands a copy of its thread's context to the autograd threads, so
that settings hold there, and each compiled backward enters that one object. Where the engine runs
two of them at once (a thread per device: a model spread over GPUs, or a graph break that leaves a
part on the CPU), the second raises `RuntimeError: cannot enter context: … is already entered`.

What is handed on enters a copy each time. torch 2.14 copies, too.
"""

from __future__ import annotations

import ast
import contextvars
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from torchcompat.errors import SourceDrift
from torchcompat.patch import Code, Patch
from torchcompat.rewrite import PLACEHOLDER, embed, recompile
from torchcompat.sign import Sign


class Handed:
    """Stands for the context that `backward()` hands on: of its methods torch uses `run`."""

    def __init__(self, context: contextvars.Context) -> None:
        self._context = context

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._context.copy().run(*args, **kwargs)


def _hands_on(function: FunctionType) -> CodeType:
    """`function`'s code with `Handed(contextvars.copy_context())` for what it stashes."""
    found: list[ast.Call] = []

    class Stash(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if ast.unparse(node) != "contextvars.copy_context()":
                return self.generic_visit(node)
            found.append(node)
            handed = ast.Attribute(ast.Constant(PLACEHOLDER), "Handed", ast.Load())
            return ast.copy_location(ast.Call(handed, [node], []), node)

    code = recompile(function, Stash().visit)
    if len(found) != 1:
        raise SourceDrift(
            f"{function.__qualname__} copies its context {len(found)} times, not once"
        )
    return embed(code, {PLACEHOLDER: SimpleNamespace(Handed=Handed)})


PATCH = Patch(
    id="backward_context",
    title="Two compiled backwards of one backward() must be able to run at the same time",
    why=(
        "In torch 2.12 and 2.13 a backward() that reaches two compiled backwards at once, on two "
        "devices, raises RuntimeError: cannot enter context: … is already entered, now and then."
    ),
    affects=">=2.12.0.dev0,<2.14.0.dev0",
    fixed_in="2.14",
    edits=(
        Code(
            target="torch.autograd.graph:_engine_run_backward",
            factory=_hands_on,
            signature=("t_outputs", "args", "kwargs"),
            anchors=('torch._C._stash_obj_in_tls("context", contextvars.copy_context())',),
        ),
    ),
    repro="repro/backward_context.py",
    links=("https://github.com/pytorch/pytorch/issues/185372",),
    signs=(
        Sign(
            text=r"cannot enter context: <_contextvars\.Context object at 0x[0-9a-fA-F]+> is "
            "already entered",
            frames=(
                "torch/_functorch/_aot_autograd/*:backward|_compiled_backward|_double_backward"
                "|impl_fn",
            ),
        ),
    ),
)
