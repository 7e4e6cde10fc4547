"""A program's command line as a job runs it. Slurm's and PBS' commands."""

import shlex
from pathlib import Path

import pytest

from mmm.errors import ConfigError, LaunchError
from mmm_lab.campaign.command import folder_of, going_on, launch_line
from mmm_lab.campaign.queues import scheduler_here, submit
from support.queue import StandIn

LM = shlex.split("python3 -m mmm.trainer.lm --preset debug")


def test_jobs_go_on_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [*LM, "--checkpoint-every", "5"]
    # The jobs could not agree on one.
    folder = folder_of(command)
    assert folder.parent == tmp_path / "outputs" / "lm"
    assert going_on(command, folder) == [*command, "--outdir", str(folder), "--resume", "auto"]
    own = [*command, "--outdir=a", "--resume=auto"]
    assert folder_of(own) == Path(tmp_path / "a")
    assert going_on(own, folder) == own
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert folder_of([*command, "--outdir", "$SCRATCH/a"]) == Path("/scratch/me/a")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--checkpoint_every"),
        (["--checkpoint_every", "5", "--resume", "other"], "--resume other"),
        (["--checkpoint_every", "5", "--overwrite"], "--overwrite"),
    ],
)
def test_a_command_that_cannot_go_on(more, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        going_on([*LM, *more], tmp_path)
    with pytest.raises(ConfigError, match="--outdir"):
        folder_of([*LM, "--outdir"])


def test_the_line_of_launch():
    saves = [*LM, "--checkpoint_every", "5", "--name", "two words"]
    assert launch_line(saves, 3600, 300).split(" python3 ") == [
        "timeout --foreground --preserve-status --signal USR1 $((3300 - SECONDS)) launch",
        "-m mmm.trainer.lm --preset debug --checkpoint_every 5 --name 'two words'",
    ]
    ends = "timeout --foreground --preserve-status --signal TERM $((3540 - SECONDS)) launch --grace 60 "
    assert launch_line(LM, 3600, 60).startswith(f"{ends}python3 ")
    # The program's
    assert launch_line([*LM, "--grace", "x"], 3600, 60).startswith(ends)
    own = ["launch", "--grace", "5", "-ppn", "2", *LM]
    assert launch_line(own, 60, 9, "my env.tar").endswith(f" launch --stage 'my env.tar' {shlex.join(own[1:])}")


def test_what_is_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="PATH"):
        scheduler_here()
    with pytest.raises(LaunchError, match="PATH"):
        submit("pbs", "x", "lm")
    StandIn(tmp_path / "bin", "pbs", monkeypatch)
    assert scheduler_here() == "pbs"


def test_submit(tmp_path, monkeypatch):
    """Slurm's variables of a job that this is called in are not those of the new one."""
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    queue = StandIn(tmp_path / "bin", "slurm", monkeypatch)
    assert submit("slurm", "#!/bin/sh\n", "lm", "6") == "1"
    argv = ["--parsable", "--job-name=lm", "--dependency=afterany:6"]
    assert queue.calls() == [["sbatch", argv, "#!/bin/sh\n", {"SLURM_CONF": "/etc/slurm.conf"}]]
    # a folder whose name is no text
    assert submit("slurm", "cd 'a\udcff'\n", "lm") == "2"
    queue.refuse()
    with pytest.raises(LaunchError, match=r"^sbatch: sbatch: error: invalid account$"):
        submit("slurm", "", "lm")
