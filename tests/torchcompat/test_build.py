"""Versions of every channel, and bounds that mean the same for all of them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from torchcompat.build import TorchBuild, find_build, parse_bounds


@pytest.mark.parametrize(
    ("version", "channel", "base", "dev_date"),
    [
        ("2.13.0", "release", "2.13.0", None),
        ("2.13.0+cpu", "release", "2.13.0", None),
        ("2.14.1+cu130", "release", "2.14.1", None),
        ("2.11.0+rocm6.4.1", "release", "2.11.0", None),
        ("2.14.0rc3+cpu", "rc", "2.14.0", None),
        ("2.15.0.dev20260715", "nightly", "2.15.0", 20260715),
        ("2.15.0.dev20260715+cu130", "nightly", "2.15.0", 20260715),
        ("2.15.0a0+nv26.10", "vendor", "2.15.0", None),
        ("2.10.0a0+b4e4ee81d3.nv25.12", "vendor", "2.10.0", None),
        ("2.9.0a0+gitabc", "source", "2.9.0", None),
        ("2.9.0a0+git0f2af8b", "source", "2.9.0", None),
        ("2.9.0a0", "source", "2.9.0", None),
        ("2.13.0+acme.1", "vendor", "2.13.0", None),
        ("not a version", "source", "not a version", None),
    ],
)
def test_channel(version: str, channel: str, base: str, dev_date: int | None) -> None:
    build = TorchBuild.of(version)
    assert (build.channel, build.base, build.dev_date) == (channel, base, dev_date)


@pytest.mark.parametrize(
    ("version", "affects", "place"),
    [
        ("2.13.0+cpu", ">=2.6.0.dev0,<2.14.0.dev0", "inside"),
        ("2.6.0", ">=2.6.0.dev0", "inside"),
        ("2.5.1+cu124", ">=2.6.0.dev0", "below"),
        ("2.14.0rc1", "<2.14.0.dev0", "above"),
        ("2.14.0", "<2.14.0.dev0", "above"),
        # The hole of PEP 440: by its rules these match neither <2.15 nor >=2.15.
        ("2.15.0.dev20260715", ">=2.15.0.dev0", "inside"),
        ("2.15.0.dev20260715", "<2.15.0.dev0", "above"),
        ("2.15.0.dev20260714", "<2.15.0.dev20260715", "inside"),
        ("2.15.0.dev20260714+cpu", "<2.15.0.dev20260715", "inside"),
        ("2.15.0.dev20260715+cpu", "<2.15.0.dev20260715", "above"),
        ("2.15.0a0+nv26.10", ">=2.15.0.dev0", "inside"),
        ("2.15.0a0+nv26.10", "<2.15.0.dev0", "above"),
        ("2.9.0a0+gitabc", "<2.9.0.dev0", "above"),
        ("2.9.0a0+gitabc", ">=2.9.0.dev0,<2.10.0.dev0", "inside"),
        ("not a version", "<2.9.0.dev0", "inside"),
    ],
)
def test_place(version: str, affects: str, place: str) -> None:
    assert TorchBuild.of(version).place(affects) == place


@pytest.mark.parametrize("affects", [">=2.6", "<2.14", "<2.14.0", ">=2.6.0.dev0,<2.14"])
def test_bounds_that_lose_nightlies_are_refused_and_the_right_ones_shown(affects: str) -> None:
    with pytest.raises(ValueError, match=r"write '(>=|<)2\.(6|14)(\.0)?\.dev0'"):
        parse_bounds(affects)


@pytest.mark.parametrize("affects", ["", "==2.13.0", "~=2.6.0.dev0", "<=2.6.0.dev0", ">=x", ">2"])
def test_other_bounds_are_refused(affects: str) -> None:
    with pytest.raises(ValueError, match=r"write '>=X\.Y\.Z\.dev0'"):
        parse_bounds(affects)


def test_the_installed_torch_is_found_without_import(world: Any) -> None:
    out = world.python("""
        import sys
        from torchcompat.build import find_build
        build = find_build()
        assert "torch" not in sys.modules
        print(build.version, build.git, build.channel)
    """)
    assert out == "2.13.0+cpu cafe1234 release"


def test_a_half_imported_torch_is_read_from_its_file(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ModuleType("torch")
    half.__path__ = [str(world.folder / "torch")]  # no __version__ yet
    monkeypatch.setitem(sys.modules, "torch", half)
    build = find_build()
    assert build is not None
    assert build.version == "2.13.0+cpu"


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert find_build() is None
