"""The doctor's checks, each with what it is to find, and the page in fresh processes."""

from __future__ import annotations

import json
import os
import time
import types

import pytest

from torchcompat import build
from torchcompat.doctor import caches, host, page, probe

OLD = time.time() - 2 * caches.OLD_S


@pytest.fixture
def folder(tmp_path):
    """Inductor's cache, and the environment that says so for all three."""
    names = ("extensions", "inductor", "triton")
    return {n: tmp_path / n for n in names}, {
        caches._VARIABLES[n]: str(tmp_path / n) for n in names
    }


def put(path, content=b"x", when=OLD):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (when, when))


def test_a_healthy_cache(folder):
    paths, environ = folder
    for name, content in (
        ("a.py", b"x"),
        ("b.so", b"\x7fELF.."),
        ("c.json", b"{}"),
        ("d.lock", b""),
    ):
        put(paths["inductor"] / "k" / name, content)
    section = caches.caches_section(environ)
    assert section.findings == []
    assert section.data["inductor"]["files"] == 4
    assert section.data["inductor"]["bytes"] == 9
    assert f"triton: {paths['triton']}: does not exist yet" in section.lines[2]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("k/.123.456.tmp", b"x", "left_over"),
        ("tmp.pid_9_abc/kernel.json", b"{}", "left_over"),
        ("ext/lock", b"", "old_locks"),
        ("k/a.py", b"", "damaged"),
        ("k/a.so", b"\x7fEL", "damaged"),
        ("k/a.json", b"", "damaged"),
    ],
)
def test_what_is_wrong_with_a_cache(folder, name, content, kind):
    paths, environ = folder
    put(paths["inductor"] / name, content)
    section = caches.caches_section(environ)
    assert section.data["inductor"][kind] in (1, [str(paths["inductor"] / name)])
    (finding,) = section.findings
    assert str(paths["inductor"] / name) in finding.text
    assert "delete" in finding.next
    put(paths["inductor"] / name, content, when=time.time())  # perhaps being written just now
    assert caches.caches_section(environ).findings == []


def test_a_cache_that_cannot_be_written(folder):
    paths, environ = folder
    paths["triton"].write_text("a file where the folder should be")
    (finding,) = caches.caches_section(environ).findings
    assert "is not writable" in finding.text
    assert "TRITON_CACHE_DIR" in finding.next


def test_little_room_and_a_look_that_ends(folder, monkeypatch):
    paths, environ = folder
    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2048))
    monkeypatch.setattr(caches, "MOST_FILES", 2)
    for i in range(3):
        put(paths["inductor"] / f"{i}.txt")
    section = caches.caches_section(environ)
    assert len(section.findings) == 3
    assert section.findings[0].text.startswith("2 KiB are free")
    assert "more than 2 files" in section.lines[1]


def a_torch(folder, version="2.13.0"):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return str(folder)


def test_copies_of_torch(tmp_path):
    one, two = a_torch(tmp_path / "one"), a_torch(tmp_path / "two")
    assert host.copies_section([one, one]).findings == []
    (finding,) = host.copies_section([one, two]).findings
    assert f"{one}/torch is imported" in finding.text
    assert two in finding.next
    (tmp_path / "script" / "torch").mkdir(parents=True)
    (finding,) = host.copies_section([str(tmp_path / "script"), one]).findings
    assert "is called torch and is none" in finding.text
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "torch.py").touch()
    (finding,) = host.copies_section([str(tmp_path / "file"), one]).findings
    assert "torch.py is called torch and is none" in finding.text


def test_metadata_of_two(tmp_path):
    path = a_torch(tmp_path)
    for version in ("2.12.0", "2.13.0"):
        (tmp_path / f"torch-{version}.dist-info").mkdir()
    (finding,) = host.copies_section([path]).findings
    assert "torch-2.12.0.dist-info, torch-2.13.0.dist-info" in finding.text


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("2.15.0.dev20260715+cpu", "nightly of 2026-07-15"),
        ("2.15.0.dev1+cpu", None),
        ("2.13.0+cpu", None),
    ],
)
def test_torch_section(monkeypatch, version, line):
    found = build.TorchBuild.of(version, "cafe", "/x/torch")
    monkeypatch.setattr(host, "find_build", lambda: found)
    section = host.torch_section()
    assert section.lines == [str(found), *([line] if line else []), "in /x/torch"]


def test_no_torch(monkeypatch):
    monkeypatch.setattr(host, "find_build", lambda: None)
    assert host.torch_section().findings[0].text == "torch is not installed"


def test_settings_that_mean_nothing_are_a_finding(monkeypatch):
    monkeypatch.setenv("TORCHCOMPAT", "yes")
    assert "it can be on, off or strict" in host.settings_section().findings[0].text


OTHER = """
import functools
import torch.leaf
original = torch.leaf.compute

@functools.wraps(original)
def compute(x, scale=1):
    return original(x, scale)

torch.leaf.compute = compute
"""


@pytest.fixture
def sick(world, tmp_path):
    """`doctor` in a world with a fake torch that has what the probe asks for."""
    world.write(
        "torch/__init__.py",
        "import types\n__version__ = '2.13.0+cpu'\nversion = types.SimpleNamespace(cuda=None)\n"
        "backends = types.SimpleNamespace()\ndef get_num_threads(): return 3\n",
    )
    world.write("other.py", OTHER)
    nowhere = {v: str(tmp_path / "caches" / n) for n, v in caches._VARIABLES.items()}

    def doctor(*args, **env):
        # Isolated from the site-packages of the machine, where a real torch would be a second copy.
        everything = {**nowhere, "TORCHCOMPAT_ONLY": "acme:negate", **env}
        done = world.run("-m", "torchcompat", "doctor", "--json", *args, **everything)
        assert done.returncode in (0, 1), done.stderr
        content = json.loads(done.stdout)
        findings = [f for f in content["findings"] if f["section"] != "copies of torch"]
        return content, findings

    return doctor


def test_the_page_of_a_clean_process(sick):
    content, findings = sick()
    assert findings == []
    assert content["sections"]["devices"]["devices"] == ["cpu: 3 threads"]
    states = {p["patch"]: p["state"] for p in content["sections"]["patches"]["patches"]}
    assert states["acme:negate"] == "applied"
    assert content["sections"]["plugins"]["patches"]["acme 1.2"] == 1


def test_without_import(sick):
    content, findings = sick("--no-import")
    assert findings == []
    assert "devices" not in content["sections"]
    states = {p["patch"]: p["state"] for p in content["sections"]["patches"]["patches"]}
    assert states["acme:negate"] == "pending"


def test_who_else_patches(sick, world):
    content, findings = sick("--import", "other")
    (finding,) = [f for f in findings if f["section"] == "other patchers"]
    text = "torch.leaf:compute, which acme:negate is about, has been replaced by "
    assert text + f"{world.folder}/other.py" in finding["text"]
    assert content["sections"]["other patchers"]["functions"][0]["patch"] == "acme:negate"
    _, findings = sick("--import", "nothing_of_that_name")
    assert "nothing_of_that_name cannot be imported: ModuleNotFoundError" in findings[0]["text"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('libcudart is not there')", "status 1, OSError: libcudart is not there"),
        ("import os; os.abort()", "status -6"),
        ("import time; time.sleep(600)", "no end after 2 s"),
    ],
)
def test_a_torch_that_breaks_cannot_break_the_doctor(sick, world, source, said):
    world.write("torch/__init__.py", source)
    content, findings = sick("--timeout", "2" if "sleep" in source else "100")
    (finding,) = findings
    assert said in finding["text"]
    assert "caches" in content["sections"]


def test_a_broken_plugin_and_a_stale_alias(sick, world):
    world.plugin("import nothing_of_that_name", "broken")
    world.write("torch/user.py", "from torch.leaf import compute\n")
    content, findings = sick("--import", "torch.user")
    (finding,) = findings
    assert finding["text"].startswith("broken is failed: entry point 'broken' does not load")
    assert finding["next"] == "mend or remove broken 1.2; the others work without it"
    assert content["sections"]["plugins"]["broken"] == ["broken 1.2"]
    assert content["sections"]["stale aliases"]["aliases"] == [
        "torch.user.compute still is the original of torch.leaf:compute"
    ]


def test_a_page_for_people(capsys, monkeypatch):
    monkeypatch.setattr(page, "probe_sections", lambda modules, timeout_s: [])
    monkeypatch.setattr(page, "caches_section", lambda: page.Section("caches", ["none"]))
    monkeypatch.setattr(page, "copies_section", lambda: page.Section("copies of torch"))
    kwargs = {"imports": True, "modules": [], "as_json": False, "timeout_s": 1}
    monkeypatch.setattr(page, "torch_section", lambda: page.Section("torch", ["x"], {"a": 1}))
    assert page.doctor(**kwargs) == 0
    assert capsys.readouterr().out.endswith("caches           none\n\nNothing to do.\n")
    ill = page.Section("torch", ["x"], {"a": 1})
    ill.find("it hurts", "do not do it")
    monkeypatch.setattr(page, "torch_section", lambda: ill)
    assert page.doctor(**kwargs) == 1
    out = capsys.readouterr().out
    assert "What to do next\n1. it hurts\n   -> do not do it\n" in out


def test_torchs_own_decorators_are_nobodys(leaf):
    assert probe._foreign_file(leaf.compute) == leaf.__file__  # no torch: anything is foreign
    assert probe._is_torchs(os.__file__)
    assert probe._is_torchs("<string>")
    assert not probe._is_torchs(pytest.__file__)


def test_usage(world):
    done = world.run("-m", "torchcompat", "doctor", "--no-import", "--import", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "exclude each other" in done.stderr
