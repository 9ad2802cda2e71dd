"""`torchcompat run`: the command takes our place, and what it starts is patched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchcompat.errors import ConfigError
from torchcompat.run import CannotRun, check_door, execute, resolve

ROOT = Path(__file__).parents[2]
ONLY = {"TORCHCOMPAT_ONLY": "acme:negate"}
PROGRAM = """
import os, sys, torch.leaf
print(torch.leaf.compute(1), os.getpid(), sys.argv[1:])
sys.exit(7)
"""


def test_what_is_run(tmp_path, monkeypatch):
    python, script = sys.executable, str(tmp_path / "x.py")
    (tmp_path / "x.py").touch()
    assert resolve([], ["mod", "-m", "--x"]) == (python, [python, "-m", "mod", "-m", "--x"])
    assert resolve(["--", "y"], ["mod", "--x"])[1] == [python, "-m", "mod", "--x", "--", "y"]
    assert resolve(["--", script, "--", "-m"]) == (python, [python, script, "--", "-m"])
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\n")
    with pytest.raises(CannotRun, match="is not executable") as caught:
        resolve([str(tool)])
    assert caught.value.status == 126
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve(["tool", "a"]) == (str(tool), ["tool", "a"])
    assert resolve(["--", str(tool)]) == (str(tool), [str(tool)])


@pytest.mark.parametrize(
    ("words", "text"), [(["nothing"], "'nothing' is not found"), (["x.py"], "no file 'x.py'")]
)
def test_what_does_not_exist(words, text):
    with pytest.raises(CannotRun, match=text) as caught:
        resolve(words)
    assert caught.value.status == 127


@pytest.mark.parametrize(("words", "module"), [([], None), (["--"], None), ([], [])])
def test_nothing_to_run(words, module):
    with pytest.raises(ConfigError, match=r"run .*wants"):
        resolve(words, module)


def test_what_the_system_refuses(tmp_path):
    program = tmp_path / "tool"
    program.write_bytes(b"\x00\x01")
    program.chmod(0o755)
    with pytest.raises(CannotRun, match="cannot be run: Exec format error"):
        execute(str(program), ["tool"], {})


def test_a_door_that_torch_keeps_shut():
    with pytest.raises(ConfigError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from"):
        check_door({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, sys.executable)


@pytest.mark.parametrize("answer", [0, 1])
def test_another_python_is_asked(tmp_path, answer):
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\nexit {answer}\n")
    python.chmod(0o755)
    if answer == 0:
        check_door({}, str(python))
    else:
        with pytest.raises(ConfigError, match=f"not installed for {python}, so nothing"):
            check_door({}, str(python))


def test_the_command_takes_our_place(world):
    world.door()
    script = str(world.write("train.py", PROGRAM))
    environ = {**os.environ, **ONLY, "PYTHONPATH": f"{world.folder}{os.pathsep}{ROOT}"}
    for words in (["--", sys.executable, script], [script], ["-m", "train"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "torchcompat", "run", *words, "--lr", "3", "--", "-m"],
            env=environ,
            cwd=world.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=60)
        assert out == f"-1 {process.pid} ['--lr', '3', '--', '-m']\n", err
        assert (process.returncode, err) == (7, "")


def test_what_the_command_starts_is_patched(world):
    world.door()
    world.write("train.py", PROGRAM)
    script = world.write(
        "outer.py", "import subprocess, sys; subprocess.run([sys.executable, 'train.py'])"
    )
    assert world.run("-m", "torchcompat", "run", str(script), **ONLY).stdout.startswith("-1 ")


def test_a_signal_ends_it_as_a_signal(world):
    world.door()
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    done = world.run("-m", "torchcompat", "run", "--", sys.executable, "-c", code)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "env", "status", "text"),
    [
        (["--", "no-such-command"], {}, 127, "command 'no-such-command' is not found"),
        ([], {}, 2, "run wants a command"),
        (["-m"], {}, 2, "run -m wants the name of a module"),
        (["true"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 2, "import torchcompat.auto"),
        (["true"], {"TORCHCOMPAT": "yes"}, 2, "it can be on, off or strict"),
    ],
)
def test_one_clear_error(world, words, env, status, text):
    world.door()
    done = world.run("-m", "torchcompat", "run", *words, **env)
    assert (done.returncode, done.stdout) == (status, "")
    (line,) = done.stderr.splitlines()
    assert text in line


REAL = textwrap.dedent("""
    import os
    import torch, torchcompat
    from torch.utils.data import DataLoader, Dataset

    def any_applied():
        return any(v.state.value == "applied" for v in torchcompat.status())

    class Answers(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return any_applied()

    if __name__ == "__main__":
        how = dict(num_workers=1, multiprocessing_context="spawn", collate_fn=list)
        print(os.environ["RANK"], any_applied(), *DataLoader(Answers(), **how), flush=True)
""")


def test_a_real_torch_its_loaders_and_torchrun(tmp_path, install_door):
    """One process tree: run -> torchrun -> workers -> DataLoader workers."""
    pytest.importorskip("torch.distributed.run")
    install_door(tmp_path)
    (tmp_path / "train.py").write_text(REAL)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "torchcompat", "run", *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 True [True]\n"), done.stderr
