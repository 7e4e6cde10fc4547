"""When the scheduler will end the job, and the signal that the ranks get some time before."""

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from mmm_launch.errors import LaunchError
from mmm_launch.spec.hosts import Job

ASK_TIMEOUT = 20.0  # s for the scheduler to answer

Ask = Callable[[list[str]], str]


@dataclass(frozen=True)
class Limits:
    """`timeout`: seconds without output after which the run hangs. `signal` goes to the ranks at `signal_at`."""

    timeout: float | None = None
    signal: int | None = None
    signal_at: float = 0.0  # time.time()
    job_end: float | None = None  # time.time() at which the scheduler ends the job, for words only
    grace: float | None = None  # seconds that ranks have before SIGKILL, where Ctrl-C or SIGTERM ends the run


def limits(timeout: float | None, asked: str | None, walltime: str | None, job: Job) -> Limits:
    """The run's clocks. `asked` is `USR1@60`: that signal, so many seconds before the job's end.

    Raises:
        LaunchError: it cannot be read, or nobody knows when the job ends.
    """
    if asked is None:
        if walltime is not None:
            raise LaunchError(f"--walltime {walltime}: it is what --signal counts from, which is not given.")
        return Limits(timeout)
    number, before = read_signal(asked)
    if walltime is not None:
        end: float | None = time.time() + seconds(walltime)
    else:
        end = job.end_time if job.end_time else ask(job)
    if end is None:
        raise LaunchError(
            f"--signal {asked}: when this job ends is not known ({job.scheduler}). Say how long it has "
            "from now on: --walltime HH:MM:SS"
        )
    return Limits(timeout, number, end - before, end)


def read_signal(text: str) -> tuple[int, float]:
    """`USR1@60` → signal number and seconds. Raises `LaunchError`."""
    match = re.fullmatch(r"(?:SIG)?(USR1|USR2|TERM|INT|HUP)@(\d+)", text.upper())
    if match is None:
        raise LaunchError(
            f"--signal {text}: write NAME@SECONDS, such as USR1@60; the names are USR1, USR2, TERM, INT, HUP."
        )
    return signal.Signals[f"SIG{match[1]}"], float(match[2])


def seconds(text: str) -> float:
    """`90`, `1:30` (min:s), `1:30:00`, `2-00:00:00` → seconds. Raises `LaunchError`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if match is None:
        raise LaunchError(f"--walltime {text}: write [DAYS-]HH:MM:SS, MM:SS, or seconds.")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def ask(job: Job, run: Ask | None = None) -> float | None:
    """When a job ends, `time.time()`, by asking the scheduler; None if it does not say.

    Jobs of a newer Slurm know it themselves.
    """
    run = run or _run
    if job.scheduler == "slurm":
        left = run(["squeue", "--noheader", "--jobs", job.job_id, "--format", "%L"]).strip()
        return time.time() + seconds(left) if re.fullmatch(r"[\d:-]+", left) else None
    if job.scheduler == "pbs":
        try:
            data = json.loads(run(["qstat", "-f", "-F", "json", job.job_id]))["Jobs"]
            facts = next(iter(data.values()))
            started = time.mktime(time.strptime(facts["stime"]))
            return started + seconds(facts["Resource_List"]["walltime"])
        except (ValueError, KeyError, StopIteration):
            return None
    return None


def _run(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_TIMEOUT)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""
