"""The example plugin, installed as a newcomer would, beside one that is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "torchcompat-example-plugin"
ID = "example:empty_batch"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the example installed by pip, offline, and a plugin that does not import."""
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(EXAMPLE, source)  # setuptools leaves build/ beside what it builds
    how = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *how, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    info = folder / "broken-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[torchcompat.patches]\nbroken = broken\n")
    return folder


@pytest.fixture
def python(site, tmp_path):
    def run(*args):
        return subprocess.run(
            [sys.executable, *args],
            env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


def test_it_is_listed_without_torch_and_the_broken_one_is_one_line(python):
    code = (
        "import sys, torchcompat; r = torchcompat.plan(); assert 'torch' not in sys.modules; "
        f"print(r['{ID}'].provenance, r['{ID}'].state in ('pending', 'missing'), "
        "[v.patch_id for v in r if v.state == 'failed'], r['fx_patcher'].state != 'failed')"
    )
    done = python("-c", code)
    expected = "torchcompat-example-plugin 0.1.0 True ['broken'] True\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_it_is_proved_beside_the_broken_one(python):
    pytest.importorskip("torch")
    done = python("-m", "torchcompat", "repro", ID, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert proof["outcome"] == "fixed by us"
    assert proof["unpatched"]["text"] == "default_collate([]): list index out of range"


def test_its_own_test_passes(python):
    """Applied, effective, taken away."""
    pytest.importorskip("torch")
    test = str(EXAMPLE / "tests" / "test_empty_batch.py")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, test)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
