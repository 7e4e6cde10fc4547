"""Slurm's and PBS' commands."""

import pytest

from mmm.errors import LaunchError
from mmm_lab.campaign.queues import cancel, scheduler_here, submit
from support.queue import StandIn


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
