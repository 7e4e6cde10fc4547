"""A run's folder: made, refused, overwritten; config.json; and what importing the room costs. Which commit a program is
of: asked of git, where there is one, and never waited for long."""

import dataclasses
import enum
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mmm.errors import RecordError
from mmm.history import History, load, plot_summary, prepare, write_config
from mmm.history.record.repository import repository_of


def test_default_folder_is_module_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = prepare(None, "fsdp_tp", False)
    second = prepare(None, "fsdp_tp", False)
    assert first.parent == tmp_path / "outputs" / "fsdp_tp"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}", first.name)
    assert first != second
    assert second.is_dir()


def test_a_name_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [prepare(None, "lm", name="wide run") for _ in range(2)]
    assert made == [tmp_path / "outputs" / "lm" / name for name in ("wide run", "wide run-2")]


def test_given_folder_is_the_folder(tmp_path):
    assert prepare(tmp_path / "a" / "b", "vit", False) == tmp_path / "a" / "b"
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    # a stranger's file is no record
    assert prepare(tmp_path / "a" / "b", "vit", False).is_dir()


@pytest.mark.parametrize("name", ["config.json", "train_dataset.h5", "journal.jsonl"])
def test_a_record_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(RecordError, match=rf"already holds.*{name}.*--overwrite"):
        prepare(tmp_path, "vit", False)
    assert (tmp_path / name).exists()


def test_overwrite_removes_the_record_and_nothing_else(tmp_path):
    with History(tmp_path, ranks=[{}]) as history:
        history.update({"loss": 1.0})
    write_config(tmp_path, {})
    (tmp_path / "log.txt").write_text("old")
    own = plot_summary(load(tmp_path), tmp_path, (".png", ".svg"))
    strangers = [
        tmp_path / name
        for name in (
            "notes.txt",
            "config.json.bak",
            "plots/mine.png",
            "checkpoints/10/w.pt",
        )
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    assert len(own) == 3
    prepare(tmp_path, "vit", True)
    left = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(strangers)
    # No record is left.
    prepare(tmp_path, "vit", False)


@pytest.mark.parametrize("linked", ["plots", "plots/mplot"])
def test_what_is_behind_a_link_stays(tmp_path, linked):
    """Another user may have made the folder, and a link to somebody's files in it."""
    folder = tmp_path / "run"
    outside = tmp_path / "theirs"
    theirs = outside / ("mplot/pngs" if linked == "plots" else "pngs") / "a.png"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    (folder / linked).parent.mkdir(parents=True)
    (folder / linked).symlink_to(outside)
    prepare(folder, "vit", True)
    assert theirs.read_text() == "theirs"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_folder_that_cannot_be_made():
    with pytest.raises(RecordError, match=r"/proc/mmm/run"):
        prepare(Path("/proc/mmm/run"), "vit", False)


def test_config_is_plain_json(tmp_path):
    class Kind(enum.Enum):
        FULL = 1

    @dataclasses.dataclass
    class Inner:
        data: Path
        sizes: tuple[int, ...]

    class dtype:
        def __str__(self):
            return "torch.bfloat16"

    config = {
        "inner": Inner(Path("/data"), (1, 2)),
        "dtype": dtype(),
        "kind": Kind.FULL,
        "none": None,
        "nan": float("nan"),
        "set": {"b", "a"},
        "array": np.array([1.5]),
        3: True,
    }
    path = write_config(tmp_path, config)
    assert path == tmp_path / "config.json"
    assert json.loads(path.read_text()) == {
        "inner": {"data": "/data", "sizes": [1, 2]},
        "dtype": "torch.bfloat16",
        "kind": "FULL",
        "none": None,
        "nan": "nan",
        "set": ["a", "b"],
        "array": [1.5],
        "3": True,
    }
    # No half-written file beside it.
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert json.loads(write_config(tmp_path, Inner(Path("x"), ())).read_text()) == {"data": "x", "sizes": []}


def test_nothing_is_written_through_a_planted_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json.tmp").symlink_to(elsewhere)
    write_config(run, {"a": 1})
    assert elsewhere.read_text() == "mine"
    assert json.loads((run / "config.json").read_text()) == {"a": 1}
    assert sorted(path.name for path in run.iterdir()) == ["config.json"]


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


@pytest.fixture
def program(tmp_path):
    """A program's file in a folder of a repository, with a commit."""
    file = tmp_path / "project" / "src" / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    me = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "."], [*me, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path / "project", *command], check=True)
    return file


@needs_git
def test_commit_branch_and_what_differs(program, monkeypatch):
    # Of a hook that starts a run.
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    head = subprocess.run(
        ["git", "--git-dir", program.parents[1] / ".git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    result = repository_of(program)
    assert result == {"folder": str(program.parents[1]), "commit": head, "branch": "trunk", "changed": 0}
    program.write_text("2\n")
    (program.parent / "unknown.py").write_text("")
    assert repository_of(program)["changed"] == 1


@needs_git
def test_no_program_of_the_repository_is_started(program, tmp_path):
    script = tmp_path / "monitor"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    subprocess.run(["git", "-C", program.parent, "config", "core.fsmonitor", script], check=True)
    assert repository_of(program)["changed"] == 0
    assert not (tmp_path / "started").exists()


def test_without_git_or_a_repository_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **named: pytest.fail("a process was started"))
    assert repository_of(tmp_path / "train.py") is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository_of(tmp_path / "train.py") is None
