"""The patches that torchcompat ships: one module each, one program that proves it in `repro/`.

Installed as `torchcompat.patches` and found through the same entry-point group as anybody's.
"""

from __future__ import annotations

from typing import Final

if __name__ != "torchcompat.patches":
    # With the repository root on sys.path, `import patches` would make a second copy of each.
    raise ImportError(f"this package is torchcompat.patches; it cannot be imported as {__name__!r}")

from torchcompat.patch import Patch
from torchcompat.sign import Hazard

from . import (
    backward_context,
    checkpoint_rng,
    compile_single_flight,
    compile_stance,
    compiled_autograd,
    config_blocks,
    config_inherit,
    config_patch_leak,
    cudagraph_threads,
    data_parallel,
    default_device,
    dispatch_mode_flags,
    dynamo_reset,
    error_on_graph_break,
    export_live_module,
    export_load,
    export_threads,
    first_import,
    fork_guard,
    forward_ad_threads,
    forward_from_src,
    fullgraph_counter,
    functional_call,
    fx_patcher,
    fx_traceback_meta,
    fx_tracing_flag,
    global_state,
    guard_scope,
    import_lock,
    inductor_autotuner,
    is_compiling_flag,
    isolate_recompiles,
    lazy_backward,
    lazy_graph_module,
    make_fx_tracer,
    metrics_context,
    pgo_threads,
    pre_dispatch_modes,
    recompile_budget,
    signs,
    triton_autotuner,
    user_object_registry,
)

PATCHES: Final[tuple[Patch, ...]] = (
    fx_tracing_flag.PATCH,
    fx_patcher.PATCH,
    make_fx_tracer.PATCH,
    fx_traceback_meta.PATCH,
    is_compiling_flag.PATCH,
    error_on_graph_break.PATCH,
    lazy_graph_module.PATCH,
    compile_single_flight.PATCH,
    lazy_backward.PATCH,
    recompile_budget.PATCH,
    user_object_registry.PATCH,
    config_inherit.PATCH,
    config_blocks.PATCH,
    dynamo_reset.PATCH,
    export_threads.PATCH,
    export_load.PATCH,
    import_lock.PATCH,
    backward_context.PATCH,
    checkpoint_rng.PATCH,
    compile_stance.PATCH,
    compiled_autograd.PATCH,
    config_patch_leak.PATCH,
    cudagraph_threads.PATCH,
    data_parallel.PATCH,
    default_device.PATCH,
    dispatch_mode_flags.PATCH,
    export_live_module.PATCH,
    first_import.PATCH,
    fork_guard.PATCH,
    forward_ad_threads.PATCH,
    forward_from_src.PATCH,
    fullgraph_counter.PATCH,
    functional_call.PATCH,
    global_state.PATCH,
    guard_scope.PATCH,
    inductor_autotuner.PATCH,
    isolate_recompiles.PATCH,
    metrics_context.PATCH,
    pgo_threads.PATCH,
    pre_dispatch_modes.PATCH,
    triton_autotuner.PATCH,
)

# Known by their signs in a log alone; `torchcompat explain LOG` finds them here.
HAZARDS: Final[tuple[Hazard, ...]] = signs.HAZARDS
