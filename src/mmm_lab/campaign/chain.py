"""The jobs that a run has had, in ``jobs/campaign.json`` of its folder, and whether another follows.

A job's script asks twice. At its beginning (`begin`): whether there is anything to do; then the next job is queued at
once, to follow this one however it ends, so that one that is killed with its host has a successor too. At its end
(`end`): whether that one is needed; if not, it is taken out of the queue.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmm.checkpoint.manifest import steps_of
from mmm.errors import LaunchError, RecordError
from mmm.history.record.ending import FAILED, FINISHED, Ending
from mmm.history.record.folder import write_atomically
from mmm.outside import read_json
from mmm.runtime.contract import SAVED_EXIT, USER_ERROR_EXIT
from mmm.units import counted
from mmm_lab.campaign import queues
from mmm_lab.runs.runs import ending_in

JOBS, FILE, CHECKPOINTS = "jobs", "campaign.json", "checkpoints"
IDLE = 2  # jobs in a row that have saved nothing new end a campaign
HANG_EXIT = 124  # of `launch --timeout`
# A failure of a host, and not of the program: another job may have other hosts.
OF_A_HOST = re.compile(r"\blost ranks? |was killed by SIG(KILL|TERM|BUS)|have not connected")


@dataclass
class Job:
    """at: steps that were saved when it began. exit_code: launch's; None while it runs, or where it was killed."""

    id: str
    at: int
    exit_code: int | None = None


@dataclass
class Campaign:
    """
    Attributes:
        folder: of the run. script: that each job runs.
        most: jobs that there may be.
        jobs: that have begun. queued: the one that waits for the last of them, if any.
        over: why no other follows; empty while one may.
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
        """Raises RecordError: it cannot be written."""
        fields = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_atomically(self.file, (json.dumps(fields, indent=1) + "\n").encode())

    def saved(self) -> int:
        """Steps of the newest checkpoint; 0 without one."""
        found = steps_of(self.folder / CHECKPOINTS)
        return int(found[0].name.rpartition("-")[2]) if found else 0

    def ending(self) -> Ending | None:
        """The run's, as its record has it; None without one."""
        try:
            return ending_in(self.folder)
        except RecordError:
            return None

    def reason_to_end(self) -> str:
        """Why no job follows the last; empty where one does."""
        if self.over or not self.jobs:
            return self.over
        last, ending = self.jobs[-1], self.ending()
        done = ending is not None and ending.state == FINISHED and self.saved() > last.at  # in this job, not before it
        if last.exit_code == 0 or done:  # which a late signal may still have killed
            return f"the run is finished, after {counted(len(self.jobs), 'job')}"
        if last.exit_code == USER_ERROR_EXIT:
            return f"job {last.id} refuses what it was asked for (exit code {last.exit_code}); its output says why"
        if _of_the_program(last.exit_code, ending):
            error = f": {ending.error}" if ending is not None and ending.error else "; its output says why"
            return f"the run fails by its own error, in job {last.id}{error}"
        at = [job.at for job in self.jobs[-IDLE:]] + [self.saved()]
        if len(at) > IDLE and len(set(at)) == 1:
            return f"{counted(IDLE, 'job')} in a row have saved nothing beyond step {at[0]}"
        if len(self.jobs) >= self.most:
            ran = f"{counted(self.most, 'job')} have run, as many as --jobs allows"
            return f"{ran}; the newest checkpoint is of step {at[-1]}"
        return ""


def _of_the_program(exit_code: int | None, ending: Ending | None) -> bool:
    """Whether the next job would fail as the last has: not after a signal or a hang, and not for a host that failed."""
    if exit_code is None:
        failed = ending is not None and ending.state == FAILED
    else:
        failed = exit_code < 128 and exit_code not in (SAVED_EXIT, HANG_EXIT)
    return failed and not (ending is not None and OF_A_HOST.search(ending.error))


def read(folder: Path) -> Campaign:
    """The campaign of a run's folder. Raises RecordError: there is none, or its file is damaged."""
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
    if campaign.scheduler not in queues.QUEUES:
        raise RecordError(f"{path} names a scheduler that is not known")
    return campaign


def goes_on(folder: Path) -> bool:
    """Whether the run of a folder has a campaign of which a job is still to come."""
    try:
        campaign = read(folder)
    except RecordError:
        return False
    return bool(campaign.queued or not campaign.jobs) and not campaign.over


def begin(folder: Path, environ: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """A job begins. Returns whether there is anything to do, and a line that says what follows.

    Raises:
        LaunchError: this is no job of the scheduler's. RecordError: as `read`.
    """
    campaign = read(folder)
    variable = queues.QUEUES[campaign.scheduler].variable
    if not (own := environ.get(variable)):
        raise LaunchError(f"mmm submit --begin is for a job's script: {variable} is not in the environment")
    if campaign.jobs and campaign.jobs[-1].id == own and not campaign.over:  # the scheduler has started it again
        return True, f"job {own} begins again; {campaign.queued or 'none'} follows it"
    if why := campaign.reason_to_end():
        _leave(campaign, why)
        return False, f"nothing to do: {why}"
    campaign.jobs.append(Job(own, campaign.saved()))
    campaign.queued = ""
    campaign.write()
    place = f"job {own}, {len(campaign.jobs)} of at most {campaign.most}, from step {campaign.jobs[-1].at}"
    if len(campaign.jobs) == campaign.most:
        return True, f"{place}; it is the last"
    try:
        queued = queues.submit(campaign.scheduler, Path(campaign.script).read_text(**queues.TEXT), campaign.name, own)
    except (LaunchError, OSError) as error:  # the steps of this job are worth more
        return True, f"{place}; none follows it: {error}. Submit the same line again once it is over"
    campaign = read(folder)  # --stop may have been meanwhile
    campaign.queued = queued
    if campaign.over:
        return False, f"nothing to do: {campaign.over}{_leave(campaign, campaign.over)}"
    campaign.write()
    return True, f"{place}; job {queued} follows it"


def end(folder: Path, exit_code: int) -> tuple[int, str]:
    """A job's launch has ended. Returns the exit code of the job, 0 where the run is finished or goes on, and a line
    that says what follows. Raises RecordError: as `read`."""
    campaign = read(folder)
    if campaign.jobs:
        campaign.jobs[-1].exit_code = exit_code
    if why := campaign.reason_to_end():
        line = _leave(campaign, why)
        return exit_code, f"no job follows: {why}{line}"
    campaign.write()
    if not campaign.queued:
        return exit_code, "none is queued: submit the same line again"
    return 0, f"saved at step {campaign.saved()}; job {campaign.queued} goes on"


def stop(folder: Path) -> str:
    """No other job follows the one that runs. Returns a line that says so. Raises RecordError: as `read`."""
    campaign = read(folder)
    if campaign.over:
        return f"it was over before: {campaign.over}"
    waiting = f"job {campaign.queued} is out of the queue" if campaign.queued else "no other job waits"
    not_taken = _leave(campaign, "mmm submit --stop")
    cancel = queues.QUEUES[campaign.scheduler].cancel
    return f"{not_taken.removeprefix('; ') or waiting}; a job that still runs is ended by {cancel}"


def status(folder: Path) -> list[str]:
    """A line a job that has begun, and what is to come. Raises RecordError: as `read`."""
    campaign = read(folder)
    saved = campaign.saved()
    lines = []
    for job, after in zip(campaign.jobs, [*(job.at for job in campaign.jobs), saved][1:], strict=True):
        ended = f"exit code {job.exit_code}" if job.exit_code is not None else "killed"
        if job.exit_code is None and job is campaign.jobs[-1]:
            ended = "runs, or has been killed"
        lines.append(f"job {job.id:<12} from step {job.at:,} to {after:,}   {ended}")
    if campaign.over:
        return [*lines, f"over: {campaign.over}"]
    lines.append(f"job {campaign.queued} waits" if campaign.queued else "no job is known to wait")
    return lines


def _leave(campaign: Campaign, why: str) -> str:
    """The campaign is over: its queued job is cancelled. Returns what to add to what is said."""
    campaign.over, waiting, campaign.queued = why, campaign.queued, ""
    campaign.write()
    try:
        if waiting:
            queues.cancel(campaign.scheduler, waiting)
    except LaunchError as error:  # it finds out itself that it has nothing to do
        return f"; job {waiting} is still in the queue ({error})"
    return ""
