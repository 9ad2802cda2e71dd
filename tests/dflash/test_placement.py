from __future__ import annotations

import pytest
import torch

from dflash import placement
from dflash.errors import ConfigError
from dflash.placement import compile_backend, cpu_threads, place, target_dtype


def names(devices):
    return [str(device) for device in devices]


@pytest.mark.parametrize(
    ("gpus", "targets", "drafters"),
    [
        (0, ["cpu"], ["cpu", "cpu"]),
        (1, ["cuda:0"], ["cuda:0"]),
        (2, ["cuda:0"], ["cuda:1"]),
        (3, ["cuda:0", "cuda:1"], ["cuda:2"]),
        (4, ["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]),
        (8, [f"cuda:{i}" for i in range(5)], [f"cuda:{i}" for i in range(5, 8)]),
    ],
)
def test_default_split(gpus, targets, drafters):
    placed = place("auto", "auto", gpus=gpus)
    assert names(placed.targets) == targets
    assert names(placed.drafters) == drafters


def test_every_gpu_is_used_once_by_default():
    for gpus in range(2, 17):
        placed = place("auto", "auto", gpus=gpus)
        assert names(placed.targets + placed.drafters) == [f"cuda:{i}" for i in range(gpus)]


def test_named_devices_are_one_thread_each():
    placed = place("cpu,cpu", "cuda:1", gpus=2)
    assert names(placed.targets) == ["cpu", "cpu"]
    assert names(placed.drafters) == ["cuda:1"]
    assert "targets and drafters as asked" in placed.reason
    assert names(place("cuda", "auto", gpus=1).targets) == ["cuda:0"]


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("cuda:3", 2, "cuda:3 is not here; this machine has cuda:0 to cuda:1"),
        ("cuda:0", 0, "no CUDA device"),
        ("gpu0", 1, "'gpu0' is not a device"),
        ("cpu,", 0, "'' is not a device"),
        ("meta", 0, "'meta' is not supported"),
    ],
)
def test_impossible_devices_are_refused(text, gpus, message):
    with pytest.raises(ConfigError, match=message) as caught:
        place(text, "auto", gpus=gpus)
    assert "placement.targets" in str(caught.value)


def test_threads_follow_the_drafters_alone(monkeypatch):
    monkeypatch.setattr(placement, "cores", lambda: 6)
    assert [cpu_threads(0, n) for n in (1, 2, 3, 4, 12)] == [6, 3, 2, 1, 1]
    assert cpu_threads(5, 2) == 5


def test_dtype_says_why(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(placement, "_cpu_bfloat16_speed", lambda: 0.7)
    assert target_dtype("auto", cpu).value == "float32"
    monkeypatch.setattr(placement, "_cpu_bfloat16_speed", lambda: 2.94)
    choice = target_dtype("auto", cpu)
    assert choice.value == "bfloat16"
    assert choice.reason == "bfloat16 is 2.9 times as fast on this CPU"
    assert target_dtype("float32", cpu).value == "float32"
    assert target_dtype("auto", torch.device("cuda", 0)).value == "bfloat16"


def test_the_cpu_is_measured_not_guessed():
    assert 0.01 < placement._cpu_bfloat16_speed() < 100


def test_backend_needs_a_compiler_on_the_cpu(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = compile_backend("auto", cpu)
    assert choice.value == "aot_eager"
    assert "no-such-compiler" in choice.reason
    assert compile_backend("eager", cpu).value == "eager"
    assert compile_backend("auto", torch.device("cuda", 0)).value == "inductor"
    monkeypatch.setattr(placement.shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(placement.sysconfig, "get_path", lambda name: "/nowhere")
    assert "Python.h" in compile_backend("auto", cpu).reason
