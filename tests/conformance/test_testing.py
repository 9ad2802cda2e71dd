"""The public suite finds what is wrong with a plugin's patches, and nothing with a good one's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PATCHES = """
from dataclasses import dataclass
from torchcompat import Edit, Finding, Patch, Value, Wrap
from torchcompat.install import AttrSlot

MODULE = "torch.nn.modules.module:Module.extra_repr"
GELU = "torch.nn.modules.activation:GELU.forward"

def through(original):
    def extra_repr(self):
        return original(self) or "acme"
    return extra_repr

def one_more(original):
    def forward(self, x):
        import torch
        return original(self, x) + (1 if torch.compiler.is_compiling() else 0)
    return forward

class Stays(AttrSlot):
    def undo(self):
        return "restored"

@dataclass(frozen=True)
class StayingEdit(Edit):
    modules = ("torch.nn.modules.activation",)
    def inspect(self):
        return Finding("ok", "there")
    def build(self):
        import torch
        cls = torch.nn.modules.activation.Tanhshrink
        return [Stays(cls, "extra_repr", lambda self: "")]

def make(name, edit, repro="needed.py"):
    return Patch(id=f"acme:{name}", title="t", why="w", affects=">=2.0.0.dev0", edits=(edit,),
                 repro=repro)

PATCHES = [
    make("good", Wrap(target=MODULE, factory=through)),
    make("visible", Value(target=MODULE, factory=lambda f: lambda self, *more: "")),
    make("wrong", Wrap(target=GELU, factory=one_more)),
    make("idle", Wrap(target=MODULE, factory=through), "idle.py"),
    make("unproved", Wrap(target=MODULE, factory=through), None),
    make("stays", StayingEdit()),
]
"""
NEEDED = """
import os, sys
print("looked")
sys.exit(os.environ["TORCHCOMPAT_REPRO_APPLY"] != "1")
"""
SUITE = """
from torchcompat.testing import Conformance, conformance

class TestGood(conformance(ids=["acme:good"])):
    backends = ("eager",)
    orders = ("apply torch compile unapply compile",)

TestNobody = conformance("nobody")
TestUnknown = conformance(ids=["acme:good", "acme:goood"])

class TestBad(Conformance):
    __test__ = True
    plugin = "acme"
    backends = ("eager",)
"""
CHOSEN = "Good or ((Nobody or Unknown) and fits) or (Bad and not good and not orders and not race)"
#: What each bad patch is found out by; all else is passed.
FOUND = {
    "visible": "test_nothing_shows_from_outside[acme:visible]",
    "wrong": "test_compiled_equals_eager_before_with_and_after[acme:wrong-eager]",
    "idle": "test_the_program_shows_the_fault_without_the_patch_only[acme:idle]",
    "unproved": "test_the_program_shows_the_fault_without_the_patch_only[acme:unproved]",
}


def test_a_plugins_author_runs_the_suite_over_his_patches(tmp_path: Path) -> None:
    package, info = tmp_path / "acme_patches", tmp_path / "acme-1.2.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(PATCHES)
    (package / "needed.py").write_text(NEEDED)
    (package / "idle.py").write_text("print('the fault')\nraise SystemExit(1)\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[torchcompat.patches]\nacme = acme_patches:PATCHES\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    root = Path(__file__).parents[2]
    options = ["-p", "no:cacheprovider", "-rA", "-k", CHOSEN, "-c", os.devnull, "--rootdir", "."]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_suite.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    lines = [line.split(" - ")[0] for line in done.stdout.splitlines()]
    failed = {line.partition("::")[2] for line in lines if line.startswith("FAILED")}
    passed = {line.partition("::")[2] for line in lines if line.startswith("PASSED")}
    assert not [name for name in failed if name.startswith("TestGood")], done.stdout[-6000:]
    assert len([name for name in passed if name.startswith("TestGood")]) == 9, done.stdout[-6000:]
    assert "TestNobody::test_every_patch_fits_or_says_why_not" in failed
    assert "TestUnknown::test_every_patch_fits_or_says_why_not" in failed
    assert "there is no patch of plugin 'nobody'" in done.stdout
    assert "unknown patches: ['acme:goood']" in done.stdout
    for name, test in FOUND.items():
        of_this = {f for f in failed if f.startswith("TestBad") and f"acme:{name}" in f}
        assert of_this == {f"TestBad::{test}"}, (name, done.stdout[-6000:])
    stays = "TestBad::test_applied_twice_and_taken_away_everything_is_as_it_was[acme:stays]"
    assert stays in failed
