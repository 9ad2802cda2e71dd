"""One log per hazard of the catalogue, most of them written by the fault itself on stock torch; and
logs of failures that are none of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchcompat.engine import ENGINE
from torchcompat.logs.read import Findings, read_blocks
from torchcompat.logs.signs import Known, known_hazards

LOGS = Path(__file__).parent / "logs"

#: What each log shows for sure, and what it may show.
SURE = {
    "backward_context": {"backward_context"},
    "compile_single_flight": {"compile_single_flight"},
    "config_patch_leak": {"config_patch_leak"},
    "config_patch_leak_2_8": {"config_patch_leak"},
    "cuda_build_without_gpu": {"cuda_build_without_gpu"},
    "cudagraph_threads": {"cudagraph_threads"},
    "dataparallel_replicas": {"data_parallel"},
    "dynamo_reset": {"dynamo_reset"},
    "export_load": {"export_load"},
    "export_load_two_at_once": {"export_load"},
    "first_import": {"first_import"},
    "fork_guard": {"fork_guard"},
    "forward_ad_threads": {"forward_ad_threads"},
    "fullgraph_counter": {"fullgraph_counter"},
    "fx_patcher": {"fx_patcher"},
    "fx_patcher_2_9": {"fx_patcher"},
    "fx_patcher_module_call": {"fx_patcher"},
    "fx_traceback_meta": {"fx_traceback_meta"},
    "fx_tracing_flag": {"fx_tracing_flag"},
    "global_state": {"global_state"},
    "guard_scope": {"guard_scope"},
    "import_lock": {"import_lock"},
    "inductor_autotuner": {"inductor_autotuner"},
    "lazy_backward": {"lazy_backward"},
    "lazy_graph_module": {"lazy_graph_module"},
    "lazy_graph_module_key": {"lazy_graph_module"},
    "make_fx_tracer": {"fx_patcher", "make_fx_tracer"},
    "metrics_context": {"metrics_context"},
    "num_threads_guard": {"num_threads_guard"},
    "pre_dispatch_modes": {"pre_dispatch_modes"},
    "recompile_budget": {"recompile_budget"},
    "recompile_budget_inner": {"recompile_budget"},
    "recompile_limit": {"recompile_limit"},
    "triton_autotuner": {"triton_autotuner"},
    "user_object_registry": {"user_object_registry"},
}
MAY_BE = {
    "checkpoint_recompute": {"checkpoint_recompute"},
    "compile_stance": {"compile_stance"},
    "compiled_autograd": {"compiled_autograd"},
    "config_inherit": {"config_inherit", "recompile_budget", "recompile_limit"},
    "error_on_graph_break": {"error_on_graph_break"},
    "export_threads": {"export_threads"},
    "lazy_graph_module_none": {"lazy_graph_module"},
}
#: Patches whose hazard leaves nothing in a log.
SILENT = {
    "checkpoint_rng",
    "config_blocks",
    "default_device",
    "dispatch_mode_flags",
    "export_live_module",
    "forward_from_src",
    "functional_call",
    "is_compiling_flag",
    "isolate_recompiles",
    "pgo_threads",
}


@pytest.fixture(scope="module")
def known() -> dict[str, Known]:
    return known_hazards(ENGINE.catalog().patches)


def read(known: dict[str, Known], name: str) -> Findings:
    return read_blocks(known, [(LOGS / f"{name}.log").read_bytes()])


@pytest.mark.parametrize("name", [*SURE, *MAY_BE])
def test_a_log_of_each_hazard(known: dict[str, Known], name: str) -> None:
    found = read(known, name)
    assert {i for i, t in found.hazards.items() if t.sure} == SURE.get(name, set())
    assert {i for i, t in found.hazards.items() if not t.sure} == MAY_BE.get(name, set())
    assert found.unknown == []
    assert found.context.version is not None


def test_every_patch_has_signs_and_a_log(known: dict[str, Known]) -> None:
    shown = set[str]().union(*SURE.values(), *MAY_BE.values())
    patches = {i for i, k in known.items() if k.patch is not None}
    assert {i for i in patches if not known[i].signs} - SILENT == set()
    assert {i for i, k in known.items() if k.signs} - shown == set()


def test_every_log_is_used() -> None:
    names = {p.stem for p in LOGS.glob("*.log")}
    assert {n for n in names if not n.startswith("unrelated_")} == {*SURE, *MAY_BE}


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("unrelated_checkpoint", ["CheckpointError"]),
        ("unrelated_deliberate_trace", ["Detected that you are using FX"]),
        (
            "unrelated_cuda_nccl",
            [
                "CUDA out of memory",
                "flash_attn",
                "AssertionError (raised by <module> in /srv/app/train.py)",
                "'NoneType' object is not a mapping",
                "Segmentation fault",
            ],
        ),
    ],
)
def test_failures_that_are_none_of_ours(
    known: dict[str, Known], name: str, messages: list[str]
) -> None:
    found = read(known, name)
    assert found.hazards == {}
    assert len(found.unknown) == len(messages)
    for tally, message in zip(found.unknown, messages, strict=True):
        assert message in tally.message


def test_errors_of_users_and_a_genuine_limit(known: dict[str, Known]) -> None:
    found = read(known, "unrelated_python")
    assert set(found.hazards) == {"recompile_limit"}  # eleven shapes: it says so, and is no fault
    assert len(found.unknown) == 7
    texts = " ".join(t.message for t in found.unknown)
    for part in ("BackendCompilerFailed", "IndexError", "KeyError", "mat1 and mat2", "NameError"):
        assert part in texts


@pytest.mark.parametrize("name", [*SURE, *MAY_BE])
def test_cut_off_at_either_end(known: dict[str, Known], name: str) -> None:
    """With a part missing, a log never shows another hazard than in full."""
    raw = (LOGS / f"{name}.log").read_bytes().splitlines(keepends=True)
    whole = SURE.get(name, set()) | MAY_BE.get(name, set())
    for cut in range(len(raw)):
        for part in (raw[cut:], raw[:cut]):
            assert set(read_blocks(known, [b"".join(part)]).hazards) <= whole
