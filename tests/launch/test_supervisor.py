"""launch's part of a run on this host: what its fork server is given, and how its end is seen."""

import os

import pytest

from mmm.launch.channel import wire
from mmm.launch.channel.wire import Instructions
from mmm.launch.plan import local
from mmm.launch.plan.options import MAX_RANKS, LaunchOptions
from mmm.launch.program.target import Target
from mmm.launch.run.control import Run
from mmm.launch.run.local import LocalRanks

STAND_IN = """
import os, time
from mmm.launch.channel.wire import FORK_SERVER_VARIABLE, Instructions, Status
todo = Instructions.read(int(os.environ[FORK_SERVER_VARIABLE]))
for each in todo.ranks:
    for code in (None, int(each["LOCAL_RANK"] == os.environ.get("WRONG"))):
        os.write(todo.status, Status(int(each["RANK"]), 1, code, time.monotonic()).dumps())
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Runs `count` ranks that a stand-in for the fork server says have ended: the exit code, and the supervisor."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(wire, "FORK_SERVER", "stand_in")

    def run(count, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        plan = local.plan(Target("code", "pass"), LaunchOptions(nproc=count, device="cpu"), environ={}, build="cpu")
        made = Run(LocalRanks(local.host_plan(plan)), plan.ranks)
        return made.run(), made

    return run


def test_as_many_ranks_as_are_promised(supervise):
    """Their variables are longer than Linux allows for a single one of the environment."""
    code, made = supervise(MAX_RANKS)
    assert (code, len(made.ended)) == (0, MAX_RANKS)
    assert len(repr(made.transport.plan.ranks)) > 131_072


def test_instructions_are_written_again_by_a_fork_server_that_starts_anew():
    todo = Instructions(3, 4, 5, [{"RANK": "0"}], True, ["x"], 7)
    for _ in range(2):
        fd = todo.write()
        assert os.get_inheritable(fd)
        assert Instructions.read(fd) == todo
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_macos_has_no_waitid(supervise, monkeypatch):
    monkeypatch.delattr(os, "waitid")
    assert supervise(2)[0] == 0
    code, made = supervise(2, WRONG="1")
    assert (code, [failure.rank for failure in made.failures]) == (1, [1])
