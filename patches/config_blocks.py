"""config_blocks: blocks in torch that assign settings and put them back must keep to their thread.

`torch._dynamo.utils.disable_cache_limit` and `torch._higher_order_ops.utils._set_compilation_env`
assign settings at their beginning and the earlier values at their end, without `config.patch()`.
Where an assignment is for all threads (up to 2.11, and with the patch config_inherit) two such
blocks that overlap (two
threads in `cond`, or in an eager flex_attention) would leave the recompile limit at its largest for
good, or take a setting from each other.

What the two assign is the block's own, as in a `config.patch()`. The functions keep their identity,
since other modules have imported them by name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torchcompat.patch import Code, Patch
from torchcompat.rewrite import PLACEHOLDER, embed, recompile

from .own_settings import Touched, own_settings, restore_settings


class Block:
    """Runs the generator function of a context manager with settings of its own."""

    def __init__(self, make: Callable[[], Iterator[None]]) -> None:
        self._make = make

    def run(self) -> Iterator[None]:
        generator: Any = self._make()
        touched: Touched = {}
        try:
            with own_settings(touched):
                next(generator)
            try:
                yield
            except BaseException as error:  # noqa: BLE001 - handed to torch's own block
                with own_settings({}):
                    generator.throw(error)
                return
            with own_settings({}):
                next(generator, None)
        finally:
            restore_settings(touched)


def _in_block(function: FunctionType) -> CodeType:
    original = FunctionType(function.__code__, function.__globals__, function.__name__)

    def change(node: ast.FunctionDef) -> ast.FunctionDef:
        body = ast.parse(f"yield from {PLACEHOLDER!r}.run()").body
        for part in body:
            for inner in ast.walk(part):
                if hasattr(inner, "lineno"):
                    ast.copy_location(inner, node.body[0])
        node.body = body
        return node

    return embed(recompile(function, change), {PLACEHOLDER: Block(original)})


PATCH = Patch(
    id="config_blocks",
    title="Blocks in torch that assign settings must keep to their thread",
    why=(
        "Two threads inside torch.cond, or inside disable_cache_limit(), put each other's settings "
        "back: the recompile limit stays at its largest, or a trace loses a setting it relies on."
    ),
    affects=">=2.6.0.dev0",
    requires=("config_inherit", "config_patch_leak"),
    edits=(
        Code(
            target="torch._dynamo.utils:disable_cache_limit",
            factory=_in_block,
            signature=(),
            anchors=("_limit = prior",),  # called cache_size_limit in 2.6
        ),
        Code(
            target="torch._higher_order_ops.utils:_set_compilation_env",
            factory=_in_block,
            signature=(),
            anchors=("_old_is_tracing",),  # in 2.6 it assigns no settings yet
        ),
    ),
    repro="repro/config_blocks.py",
)
