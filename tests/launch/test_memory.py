"""The folder in memory: it outlives the ranks, and nothing outlives the run."""

import os
import signal
import time
from pathlib import Path

import pytest

from mmm.contract import MEMORY_VARIABLE
from mmm.launch.host import memory
from mmm.launch.host.memory import host_memory
from support.clock import PATIENCE

PROGRAM = f"""
import os, time
from pathlib import Path
folder, attempt = Path(os.environ["{MEMORY_VARIABLE}"]), os.environ["MMM_ATTEMPT"]
with open("found", "a") as file:
    file.write(f"{{attempt}} {{folder}} {{','.join(sorted(os.listdir(folder)))}}\\n")
(folder / f"left-by-{{attempt}}").mkdir(exist_ok=True)
(folder / f"left-by-{{attempt}}" / "data").write_bytes(bytes(5000))
Path("pids").write_text(f"{{os.getpid()}} {{os.getppid()}}")
Path(f"there-{{attempt}}").touch()
"""
KILLED = "if attempt == '0' and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(90 * (attempt == '0'))"
ELASTIC = ("--elastic", "1:1")


@pytest.fixture
def start(launcher):
    def begin(more, *words):
        launcher.write("t.py", PROGRAM + more)
        return launcher.start(*words, "--device", "cpu", "python3", "t.py")

    return begin


def found(launcher):
    """Of each attempt the folder, and what was in it."""
    lines = (launcher.folder / "found").read_text().splitlines()
    return [(Path(folder), names) for _, folder, names in (line.split(" ") for line in lines)]


def gone(folder, within=5.0):
    deadline = time.monotonic() + within
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not folder.exists()


@pytest.mark.parametrize("words", [("--elastic", "1:2"), ("-n", "2", "--retries", "1")], ids=["elastic", "retries"])
def test_it_outlives_the_ranks_and_not_the_run(launcher, start, words):
    process = start(KILLED, *words)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    folders, left = zip(*found(launcher), strict=True)
    assert len(set(folders)) == 1
    assert (left[0], left[-1].partition(",")[0]) == ("", "left-by-0")
    assert not folders[0].exists()


@pytest.mark.parametrize("words", [ELASTIC, ("-n", "1", "--retries", "1")], ids=["elastic", "retries"])
def test_launch_is_killed(launcher, start, words):
    process = start("[time.sleep(0.05) for _ in range(1800)]", *words)
    launcher.wait_for("there-0")
    ((folder, _),) = found(launcher)
    assert (folder / "left-by-0").exists()
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert gone(folder)


def test_the_agent_is_killed(launcher, start):
    process = start("time.sleep(90 if attempt == '0' else 0)", *ELASTIC)
    launcher.wait_for("there-0")
    server = int((launcher.folder / "pids").read_text().split()[1])
    agent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    (first, _), (second, names) = found(launcher)
    assert (first != second, names) == (True, "")
    assert gone(first)
    assert gone(second)


def test_what_nobody_holds_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "TMPFS", tmp_path)
    left = tmp_path / f"{memory.PREFIX}{os.getuid()}-left"
    left.mkdir()
    one, two = dict[str, str](), dict[str, str]()
    with host_memory(one):
        held = Path(one[MEMORY_VARIABLE])
        assert sorted(tmp_path.iterdir()) == [held]
        with host_memory(two):
            assert held.exists()
            assert two[MEMORY_VARIABLE] != one[MEMORY_VARIABLE]
    assert not list(tmp_path.iterdir())


def test_a_system_that_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "TMPFS", tmp_path / "none")
    given = {MEMORY_VARIABLE: "of another launch"}
    with host_memory(given):
        assert given == {}
