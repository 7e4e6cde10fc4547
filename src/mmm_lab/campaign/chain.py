"""The jobs that a run has had, in ``jobs/campaign.json`` of its folder, and whether another follows.

A job's script calls this twice. At its beginning (`begin`) it asks whether there is anything left to do, and queues the
next job at once. That one follows this one however it ends, so that a job that is killed with its host has a successor
too. At its end (`end`) it asks whether that successor is needed, and if not takes it out of the queue.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmm.checkpoint.manifest import steps_of
from mmm.errors import LaunchError, RecordError
from mmm.history.record.ending import FAILED, FINISHED, Ending
from mmm.history.record.folder import write_atomically
from mmm.outside import read_json
from mmm.units import counted
from mmm_lab.campaign import queues
from mmm_lab.runs.runs import ending_in
from mmm_launch.contract import SAVED_EXIT, USER_ERROR_EXIT

JOBS = "jobs"
FILE = "campaign.json"
CHECKPOINTS = "checkpoints"
IDLE = 2  # so many jobs in a row that save nothing new end a campaign
HANG_EXIT = 124  # exit code of `launch --timeout`
# A host failed, not the program: another job may get other hosts.
OF_A_HOST = re.compile(r"\blost ranks? |was killed by SIG(KILL|TERM|BUS)|have not connected")


@dataclass
class Job:
    """A job that has begun.

    Attributes:
        first_step: number of steps that were saved when it began.
        exit_code: launch's exit code; None while the job runs, or if it was killed.
    """

    id: str
    first_step: int
    exit_code: int | None = None


@dataclass
class Campaign:
    """A run over many jobs.

    Attributes:
        folder: folder of the run.
        script: path of the script that each job runs.
        most: the most jobs that there may be.
        jobs: jobs that have begun.
        queued: id of the job that waits for the last of them; empty without one.
        over: why no other job follows; empty while one may.
    """

    folder: Path
    scheduler: str
    name: str
    script: str
    most: int
    jobs: list[Job] = field(default_factory=list)
    queued: str = ""
    over: str = ""

    @property
    def file(self) -> Path:
        return self.folder / JOBS / FILE

    def write(self) -> None:
        """Write the file. Raises RecordError if that fails."""
        fields = {
            "scheduler": self.scheduler,
            "name": self.name,
            "script": self.script,
            "most": self.most,
            "jobs": [
                {
                    "id": job.id,
                    "at": job.first_step,
                    "exit_code": job.exit_code,
                }
                for job in self.jobs
            ],
            "queued": self.queued,
            "over": self.over,
        }
        write_atomically(self.file, (json.dumps(fields, indent=1) + "\n").encode())

    def saved(self) -> int:
        """Number of steps in the newest checkpoint; 0 without one."""
        checkpoints = steps_of(self.folder / CHECKPOINTS)
        if not checkpoints:
            return 0
        return int(checkpoints[0].name.rpartition("-")[2])

    def ending(self) -> Ending | None:
        """How the run ended, as its record says; None without a record."""
        try:
            return ending_in(self.folder)
        except RecordError:
            return None

    def reason_to_end(self) -> str:
        """Why no job follows the last; empty if one does."""
        if self.over or not self.jobs:
            return self.over
        last = self.jobs[-1]
        ending = self.ending()
        saved = self.saved()
        # The run may have been finished in this job, which a late signal then killed.
        finished = ending is not None and ending.state == FINISHED and saved > last.first_step
        if last.exit_code == 0 or finished:
            return f"the run is finished, after {counted(len(self.jobs), 'job')}"
        if last.exit_code == USER_ERROR_EXIT:
            return f"job {last.id} refuses what it was asked for (exit code {last.exit_code}); its output says why"
        if _of_the_program(last.exit_code, ending):
            error = "; its output says why"
            if ending is not None and ending.error:
                error = f": {ending.error}"
            return f"the run fails by its own error, in job {last.id}{error}"
        steps = [job.first_step for job in self.jobs[-IDLE:]] + [saved]
        if len(steps) > IDLE and len(set(steps)) == 1:
            return f"{counted(IDLE, 'job')} in a row have saved nothing beyond step {saved}"
        if len(self.jobs) >= self.most:
            jobs = f"{counted(self.most, 'job')} have run, as many as --jobs allows"
            return f"{jobs}; the newest checkpoint is of step {saved}"
        return ""


def _of_the_program(exit_code: int | None, ending: Ending | None) -> bool:
    """Whether the next job would fail as the last did.

    It would not after a signal or a hang, nor when a host failed.
    """
    if exit_code is None:
        failed = ending is not None and ending.state == FAILED
    else:
        # A shell adds 128 to the number of a signal.
        failed = exit_code < 128 and exit_code not in (SAVED_EXIT, HANG_EXIT)
    return failed and not (ending is not None and OF_A_HOST.search(ending.error))


def read(folder: Path) -> Campaign:
    """The campaign of a run's folder. Raises RecordError if there is none, or its file is damaged."""
    path = folder / JOBS / FILE
    if not path.exists():
        raise RecordError(f"{folder} has no campaign: mmm submit --until-done makes one")
    fields: dict[str, Any] = read_json(path, RecordError)
    names = ("scheduler", "name", "script", "most", "queued", "over")
    try:
        jobs = [Job(str(job["id"]), int(job["at"]), job["exit_code"]) for job in fields["jobs"]]
        campaign = Campaign(folder, jobs=jobs, **{name: fields[name] for name in names})
    except (TypeError, KeyError, ValueError):
        raise RecordError(f"{path} is damaged: it is not what mmm submit has written") from None
    # A newer version may know more schedulers.
    if campaign.scheduler not in queues.QUEUES:
        raise RecordError(f"{path} names a scheduler that is not known")
    return campaign


def goes_on(folder: Path) -> bool:
    """Whether a folder's run has a campaign with another job to come."""
    try:
        campaign = read(folder)
    except RecordError:
        return False
    # Before the first job begins there is a campaign, and nothing is queued by it.
    return bool(campaign.queued or not campaign.jobs) and not campaign.over


def begin(folder: Path, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Note that a job begins, and queue the next one.

    Returns:
        Whether there is anything to do, and a line that says what follows.

    Raises:
        LaunchError: this is not a job of the scheduler.
        RecordError: as for `read`.
    """
    campaign = read(folder)
    variable = queues.QUEUES[campaign.scheduler].variable
    own_id = environ.get(variable)
    if not own_id:
        raise LaunchError(f"mmm submit --begin is for a job's script: {variable} is not in the environment")
    if campaign.jobs and campaign.jobs[-1].id == own_id and not campaign.over:
        # The scheduler has started the same job again.
        return True, f"job {own_id} begins again; {campaign.queued or 'none'} follows it"
    why = campaign.reason_to_end()
    if why:
        _leave(campaign, why)
        return False, f"nothing to do: {why}"
    job = Job(own_id, campaign.saved())
    campaign.jobs.append(job)
    campaign.queued = ""
    campaign.write()
    place = f"job {own_id}, {len(campaign.jobs)} of at most {campaign.most}, from step {job.first_step}"
    # The last job queues no successor.
    if len(campaign.jobs) == campaign.most:
        return True, f"{place}; it is the last"
    try:
        script = Path(campaign.script).read_text(**queues.TEXT)
        queued = queues.submit(campaign.scheduler, script, campaign.name, own_id)
    except (LaunchError, OSError) as error:
        # This job still makes its steps.
        return True, f"{place}; none follows it: {error}. Submit the same line again once it is over"
    # Somebody may have called --stop in the meantime.
    campaign = read(folder)
    campaign.queued = queued
    if campaign.over:
        return False, f"nothing to do: {campaign.over}{_leave(campaign, campaign.over)}"
    campaign.write()
    return True, f"{place}; job {queued} follows it"


def end(folder: Path, exit_code: int) -> tuple[int, str]:
    """Note that a job's launch has ended.

    Returns:
        The exit code of the job, which is 0 if the run is finished or continues; and a line that says what follows.

    Raises:
        RecordError: as for `read`.
    """
    campaign = read(folder)
    if campaign.jobs:
        campaign.jobs[-1].exit_code = exit_code
    why = campaign.reason_to_end()
    if why:
        line = _leave(campaign, why)
        return exit_code, f"no job follows: {why}{line}"
    campaign.write()
    if not campaign.queued:
        return exit_code, "none is queued: submit the same line again"
    return 0, f"saved at step {campaign.saved()}; job {campaign.queued} continues"


def stop(folder: Path) -> str:
    """End a campaign with the job that runs. Returns a line that says so. Raises RecordError: as for `read`."""
    campaign = read(folder)
    if campaign.over:
        return f"it was over before: {campaign.over}"
    waiting = "no other job waits"
    if campaign.queued:
        waiting = f"job {campaign.queued} is out of the queue"
    still_queued = _leave(campaign, "mmm submit --stop").removeprefix("; ")
    cancel = queues.QUEUES[campaign.scheduler].cancel
    return f"{still_queued or waiting}; a job that still runs is ended by {cancel}"


def status(folder: Path) -> list[str]:
    """A line for each job that has begun, and one on what follows. Raises RecordError: as for `read`."""
    campaign = read(folder)
    lines = []
    # A job ends at the step at which the next one begins.
    last_steps = [*(job.first_step for job in campaign.jobs[1:]), campaign.saved()]
    for job, last_step in zip(campaign.jobs, last_steps, strict=False):
        ended = "killed"
        if job.exit_code is not None:
            ended = f"exit code {job.exit_code}"
        elif job is campaign.jobs[-1]:
            ended = "runs, or has been killed"
        lines.append(f"job {job.id:<12} from step {job.first_step:,} to {last_step:,}   {ended}")
    if campaign.over:
        lines.append(f"over: {campaign.over}")
    elif campaign.queued:
        lines.append(f"job {campaign.queued} waits")
    else:
        lines.append("no job is known to wait")
    return lines


def _leave(campaign: Campaign, why: str) -> str:
    """End a campaign, and cancel its queued job. Returns what to add to a message if that failed."""
    # The file is written first: the next job reads it, also if it cannot be cancelled.
    waiting = campaign.queued
    campaign.over = why
    campaign.queued = ""
    campaign.write()
    try:
        if waiting:
            queues.cancel(campaign.scheduler, waiting)
    except LaunchError as error:
        # When the job begins it finds out itself that there is nothing to do.
        return f"; job {waiting} is still in the queue ({error})"
    return ""
