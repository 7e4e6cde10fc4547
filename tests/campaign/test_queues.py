"""Slurm's and PBS' commands."""

import pytest

from mmm.campaign.queues import QUEUES, cancel, scheduler_here, submit, submit_words, unknown_machine
from mmm.errors import LaunchError
from mmm.machines.machine import CHOICES
from support.queue import StandIn


def test_every_scheduler_that_a_machine_may_name_has_its_words():
    assert set(QUEUES) == set(CHOICES["scheduler"])


def test_what_is_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="PATH"):
        scheduler_here()
    with pytest.raises(LaunchError, match="PATH"):
        submit("pbs", "x", "lm")
    StandIn(tmp_path / "bin", "pbs", monkeypatch)
    assert scheduler_here() == "pbs"


def test_submit_and_cancel(tmp_path, monkeypatch):
    queue = StandIn(tmp_path / "bin", "slurm", monkeypatch)
    assert submit("slurm", "#!/bin/sh\n", "lm", "6") == "1"
    cancel("slurm", "1")
    assert [call[:3] for call in queue.calls()] == [
        ["sbatch", ["--parsable", "--job-name=lm", "--dependency=afterany:6"], "#!/bin/sh\n"],
        ["scancel", ["1"], ""],
    ]
    assert submit("slurm", "cd 'a\udcff'\n", "lm") == "3"  # a folder whose name is no text
    queue.refuse()
    with pytest.raises(LaunchError, match=r"^sbatch: sbatch: error: invalid account$"):
        submit("slurm", "", "lm")


def test_a_machine_that_is_not_known():
    assert unknown_machine("slurm", None, None).script == ["#SBATCH -N {hosts} -t {time}"]
    assert unknown_machine("pbs", "q", "p").script[2:] == ["#PBS -q {queue}", "#PBS -A {project}"]
    assert submit_words("pbs", "lm", "3.pbs") == ["qsub", "-N", "lm", "-W", "depend=afterany:3.pbs"]
