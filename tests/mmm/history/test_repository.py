"""Which commit a program is of: asked of git, where there is one, and never waited for long."""

import shutil
import subprocess

import pytest

from mmm.history.record.repository import commit_text, repository_of

HASH = "0123456789abcdef"
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


@pytest.fixture
def program(tmp_path):
    """A program's file in a folder of a repository, with a commit."""
    file = tmp_path / "project" / "src" / "train.py"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    me = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], [*me, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path / "project", *words], check=True)
    return file


@needs_git
def test_commit_branch_and_what_differs(program, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/elsewhere")  # of a hook that starts a run
    head = subprocess.run(
        ["git", "--git-dir", program.parents[1] / ".git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    found = repository_of(program)
    assert found == {"folder": str(program.parents[1]), "commit": head, "branch": "trunk", "changed": 0}
    assert commit_text(found) == head[:12]
    program.write_text("2\n")
    (program.parent / "unknown.py").write_text("")
    assert repository_of(program)["changed"] == 1
    assert commit_text(repository_of(program)) == f"{head[:12]} + 1 changed file"


@needs_git
def test_no_program_of_the_repository_is_started(program, tmp_path):
    script = tmp_path / "monitor"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    subprocess.run(["git", "-C", program.parent, "config", "core.fsmonitor", script], check=True)
    assert repository_of(program)["changed"] == 0
    assert not (tmp_path / "started").exists()


def test_without_git_or_a_repository_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: pytest.fail("a process was started"))
    assert repository_of(tmp_path / "train.py") is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository_of(tmp_path / "train.py") is None


@pytest.mark.parametrize("odd", [None, [], {}, {"commit": None}, {"problem": "x"}, {"commit": 3}])
def test_what_the_record_does_not_say(odd):
    assert commit_text(odd) is None
    assert commit_text({"commit": HASH, "changed": "many"}) == HASH[:12]
