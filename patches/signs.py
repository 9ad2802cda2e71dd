"""How hazards show that have no patch: what each is, the signs in a log, and what to do.

A hazard that gets a patch takes its signs along into the patch's module.
"""

from __future__ import annotations

from typing import Final

from torchcompat.sign import Hazard, Sign

_LIMIT: Final = (
    r"torch\._dynamo hit config\.\w+ \(\d+\)(?!(?s:.)*external_utils\.py)(?s:.)*last reason:.*"
)

HAZARDS: Final[tuple[Hazard, ...]] = (
    Hazard(
        id="recompile_limit",
        title="A function met more different inputs than its recompile limit allows",
        advice=(
            "The log gives different inputs as the reason: mark the dimension dynamic, pad to few "
            "sizes, or raise torch._dynamo.config.recompile_limit. If nine or more threads make "
            "the function's first call together, duplicates may have used up the limit "
            "(compile_single_flight)."
        ),
        signs=(
            Sign(
                text=_LIMIT
                + r"(?:(?:size|stride|rank|dtype|requires_grad|dispatch key set) mismatch"
                r"|expected \S+, actual \S+| == )",
                kind="log",
            ),
            Sign(text="FailOnRecompileLimitHit: ", sure=False),
        ),
    ),
    Hazard(
        id="num_threads_guard",
        title="Compiled code depends on the thread count of the thread that compiled it",
        advice=(
            "Call torch.set_num_threads() with one value, before the first compile, in all "
            "threads that run compiled code, the ones that run backward() included."
        ),
        signs=(
            Sign(text=_LIMIT + r"GLOBAL_STATE changed: .*num_threads", kind="log"),
            Sign(
                text="CheckpointError: torch.utils.checkpoint: A different number of tensors was "
                "saved during the original forward and recomputation",
                elsewhere="GLOBAL_STATE changed: num_threads",
            ),
            Sign(
                text="CheckpointError: torch.utils.checkpoint: Recomputed values for the following "
                "tensors have different metadata than during the forward pass",
                elsewhere="GLOBAL_STATE changed: num_threads",
            ),
        ),
    ),
    Hazard(
        id="checkpoint_recompute",
        title="A checkpoint's recomputation must run as its forward did",
        advice=(
            "With torch.compile in threads: forward and backward on threads with the same "
            "torch.set_num_threads(), no compile of other threads that overlaps (patches "
            "fx_patcher, recompile_budget), CPU random numbers from generators of their own. "
            "Without threads it is the model: checkpoint(..., debug=True) shows the difference."
        ),
        signs=(
            Sign(
                text="CheckpointError: torch.utils.checkpoint: A different number of tensors was "
                "saved during the original forward and recomputation",
                elsewhere="torch/_dynamo/",
                sure=False,
            ),
            Sign(
                text="CheckpointError: torch.utils.checkpoint: Recomputed values for the following "
                "tensors have different metadata than during the forward pass",
                elsewhere="torch/_dynamo/",
                sure=False,
            ),
        ),
    ),
    Hazard(
        id="cuda_build_without_gpu",
        title="A CUDA build on a machine without a GPU, whose first compiling thread has ended",
        advice="torch 2.12 has it fixed. Before: make the first compile in the main thread.",
        signs=(
            Sign(
                text="^Fatal Python error: Segmentation fault",
                kind="dump",
                raised_in="torch/_subclasses/fake_tensor.py:__enter__",
            ),
        ),
    ),
)
