"""Archives and folders are read within bounds, and a hostile one is one clear error."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from torchcompat.errors import ConfigError, SourceDrift
from torchcompat.textual import tree
from torchcompat.textual.tree import Archive, open_tree

INIT = "torch/__init__.py"


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """A zip with torch/__init__.py and what a test adds."""

    def make(*members: tuple[str | zipfile.ZipInfo, str], method: int = zipfile.ZIP_STORED) -> Path:
        path = tmp_path / "torch.whl"
        with zipfile.ZipFile(path, "w", method) as z:
            for name, text in ((INIT, "x = 1\n"), *members):
                with pytest.warns(UserWarning) if name in z.namelist() else _nothing():
                    z.writestr(name, text)
        return path

    return make


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def refused(path: Path) -> str:
    """What is said of an archive that is not read."""
    with pytest.raises(ConfigError) as caught:
        found = open_tree(str(path))
        for file in found.modules("torch").values():
            found.text(file)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_modules_of_a_package(archive: Callable[..., Path]) -> None:
    names = ["torch/a.py", "torch/a/__init__.py", "torch/a/b.py", "torch/not-a-name.py", "c.py"]
    found = open_tree(str(archive(*((name, "") for name in names), ("torch/data.bin", "x"))))
    assert found.modules("torch") == {
        "torch": INIT,
        "torch.a": "torch/a/__init__.py",
        "torch.a.b": "torch/a/b.py",
    }
    assert found.file_of("torch.a.b") == "torch/a/b.py"
    assert found.file_of("triton.runtime") is None


@pytest.mark.parametrize(
    "name",
    [
        "../evil.py",
        "torch/../../evil.py",
        "/etc/evil.py",
        "torch\\evil.py",
        "torch//a.py",
        "./a.py",
    ],
)
def test_names_that_lead_elsewhere(archive: Callable[..., Path], name: str) -> None:
    assert "is no plain relative name" in refused(archive((name, "x")))


def test_a_torch_that_lies_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "torch.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("../" + INIT, "")
    assert "is no plain relative name" in refused(path)


def test_a_name_with_a_null_in_it(archive: Callable[..., Path]) -> None:
    path = archive(("torch/evil.pyX.txt", "x"))
    path.write_bytes(path.read_bytes().replace(b"pyX", b"py\0"))
    assert "is no plain relative name" in refused(path)


def test_a_link(archive: Callable[..., Path]) -> None:
    for name in ("torch/a.py", "torch/folder"):
        member = zipfile.ZipInfo(name)
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        assert f"{name!r} is a link" in refused(archive((member, "/etc/passwd")))


def test_a_name_said_twice(archive: Callable[..., Path]) -> None:
    assert "'torch/a.py' is in it twice" in refused(archive(("torch/a.py", ""), ("torch/a.py", "")))


def test_an_encrypted_member(archive: Callable[..., Path]) -> None:
    path = archive(("torch/a.py", "secret"))
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")  # the central directory's last entry
    content[entry + 8] |= 0x1
    path.write_bytes(content)
    assert "'torch/a.py' is encrypted" in refused(path)


def test_other_compression(archive: Callable[..., Path]) -> None:
    path = archive(("torch/a.py", "x" * 1000), method=zipfile.ZIP_LZMA)
    assert "is packed in a way (method 14)" in refused(path)


def test_a_bomb_that_says_so(archive: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_FILE", 1000)
    path = archive(("torch/a.py", "x" * 100_000), method=zipfile.ZIP_DEFLATED)
    assert "'torch/a.py' is larger than 1000 bytes" in refused(path)


def test_a_bomb_that_lies_about_its_size(archive: Callable[..., Path]) -> None:
    """The size in the directory is what is read; the rest does not match the checksum."""
    path = archive(("torch/a.py", "x" * 100_000), method=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<L", 10)
    path.write_bytes(content)
    assert "member 'torch/a.py' cannot be read" in refused(path)


def test_many_small_members(archive: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_TOTAL", 1000)
    members = [(f"torch/m{i}.py", "x" * 100) for i in range(20)]
    assert "more than 1000 bytes to read" in refused(archive(*members))
    monkeypatch.setattr(tree, "MAX_MEMBERS", 10)
    assert "more than 10 members" in refused(archive(*members))


def test_a_truncated_archive(archive: Callable[..., Path]) -> None:
    path = archive(("torch/a.py", "x" * 1000))
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        assert "no readable wheel or zip" in refused(path)


def test_a_member_that_is_damaged(archive: Callable[..., Path]) -> None:
    path = archive(("torch/a.py", "abcdef"))
    path.write_bytes(path.read_bytes().replace(b"abcdef", b"abcdeg"))
    assert "member 'torch/a.py' cannot be read" in refused(path)
    packed = archive(("torch/a.py", "abcdef" * 100), method=zipfile.ZIP_DEFLATED)
    stream = zlib.compressobj(wbits=-15)
    data = stream.compress(b"abcdef" * 100) + stream.flush()
    assert data in packed.read_bytes()
    packed.write_bytes(packed.read_bytes().replace(data, b"\xff" * len(data)))
    assert "member 'torch/a.py' cannot be read" in refused(packed)


def test_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("other/__init__.py", "")
    assert "no torch/__init__.py in this archive" in refused(path)
    assert "no torch/__init__.py in this folder" in refused(tmp_path)
    assert "no such file or folder" in refused(tmp_path / "gone")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_folder_with_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe is not opened: that would wait for ever."""
    (tmp_path / "torch").mkdir()
    (tmp_path / INIT).write_text("")
    os.mkfifo(tmp_path / "torch/pipe.py")
    assert open_tree(str(tmp_path)).bytes_of("torch/pipe.py") is None
    monkeypatch.setattr(tree, "MAX_FILE", 10)
    (tmp_path / "torch/big.py").write_text("x" * 11)
    assert "torch/big.py is larger than 10 bytes" in refused(tmp_path)


def test_the_version_and_where_it_is_from(tmp_path: Path, archive: Callable[..., Path]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / INIT).write_text("")
    assert open_tree(str(tmp_path)).build().version == "unknown"
    (tmp_path / "version.txt").write_text("2.16.0a0\n")
    assert open_tree(str(tmp_path)).build().channel == "source"
    (tmp_path / "torch/version.py").write_text("__version__ = '2.15.0+cpu'\ngit_version = 'abc'\n")
    build = open_tree(str(tmp_path)).build()
    assert (build.version, build.git) == ("2.15.0+cpu", "abc")
    metadata = ("torch-2.14.1.dist-info/METADATA", "Name: torch\nVersion: 2.14.1\n\nVersion: 1\n")
    assert open_tree(str(archive(metadata))).build().version == "2.14.1"


def test_text_is_decoded_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / INIT).write_bytes(b"# coding: latin-1\nx = '\xe9'\r\n")
    (tmp_path / "torch/a.py").write_bytes(b"x = '\xe9'\n")
    found = open_tree(str(tmp_path))
    assert found.text(INIT) == "# coding: latin-1\nx = 'é'\n"
    with pytest.raises(SourceDrift, match=r"torch/a\.py cannot be decoded"):
        found.text("torch/a.py")


def test_members_nobody_asks_for_do_not_matter(archive: Callable[..., Path]) -> None:
    """A link in the documentation of a checkout is no reason not to read its torch."""
    member = zipfile.ZipInfo("docs/link")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    found = open_tree(str(archive((member, "elsewhere"))))
    assert isinstance(found, Archive)
    assert found.modules("torch") == {"torch": INIT}
