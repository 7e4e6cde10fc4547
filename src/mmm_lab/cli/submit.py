"""``mmm submit … -- COMMAND``: a job script of this machine, shown and submitted, once or as several jobs in a row."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mmm.errors import ConfigError, LaunchError
from mmm_lab.campaign import command as commands
from mmm_lab.campaign import queues
from mmm_lab.cli.parser import Parser, count, split_at_dashes
from mmm_lab.cli.sizes import clock_time, job_time, parse_time
from mmm_lab.planner.script import FOLDER, PROJECT, job_script
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine
from mmm_launch.machines.queues import not_taken, queue_for

EPILOG = """\
COMMAND is started by launch, and may begin with it: `-- launch --stage env.tar python3 …`. docs/clusters.md says more.

examples:
  mmm submit --site perlmutter -N 4 -t 6:00 --project m1234 --dry-run -- python3 -m mmm.trainer.lm --preset llama-1b
  mmm submit -t 1:00 --project m1234 -- apptainer exec --nv image.sif launch python3 -m mmm.trainer.lm …
  mmm submit -N 4 -t 6:00 --project m1234 --jobs 4 -- python3 -m mmm.trainer.lm … --checkpoint_every 500
exit codes: 0 submitted or shown, 2 wrong arguments, or the scheduler refuses a job
"""
MOST_JOBS = 1000


class JobScript(NamedTuple):
    """A script that can be submitted.

    Attributes:
        text: the script itself.
        scheduler: "slurm", "pbs" or "flux".
        name: the job's name.
        folder: the run's folder, if several jobs continue one run; else None.
        queue: why the queue is not the machine's usual one; empty where it is.
    """

    text: str
    scheduler: str
    name: str
    folder: Path | None
    queue: str


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="mmm submit",
        usage="mmm submit -N HOSTS -t TIME [OPTIONS] -- COMMAND",
        description="Submit a job script of this machine, once or as several jobs in a row that continue one run.",
        epilog=EPILOG,
    )
    add = made.add_argument
    add("--site", metavar="NAME", help="a known machine (mmm machine); default: this one, or only its scheduler")
    add(
        "-N",
        "--nhosts",
        metavar="N",
        type=count,
        default=1,
        help="number of hosts (default: 1)",
    )
    add(
        "-t",
        "--time",
        required=True,
        metavar="TIME",
        type=job_time,
        help="time of a job: 6h, 90m, or HOURS:MINUTES, such as 6:00",
    )
    add("-A", "--project", metavar="P", help="the project that is charged")
    add("-q", "--queue", metavar="Q", help="default: the machine's usual one, or one that takes the job")
    add(
        "--jobs",
        metavar="N",
        type=int,
        help="N jobs, each of which waits for the one before and resumes the run from its last checkpoint",
    )
    add(
        "--before-end",
        metavar="TIME",
        type=parse_time,
        help="save this long before the job ends (default: 5m, at most a tenth of -t)",
    )
    add("--stage", metavar="PATH", help="an environment that launch copies to each host's own disk")
    add(
        "--setup",
        metavar="LINE",
        action="append",
        help="a line of the script, instead of the machine's modules; repeatable",
    )
    add(
        "--directive",
        metavar="TEXT",
        action="append",
        default=[],
        help="a line for the scheduler: --directive=--gpus-per-node=4",
    )
    add("--dry-run", action="store_true", help="show the script and the command that would submit it, and do nothing")
    return made


def main(argv: list[str]) -> int:
    """Show the script, and submit it. Returns 0.

    Raises:
        UserError: something is wrong, before anything is written; or the scheduler takes no job.
    """
    own, command = split_at_dashes(argv)
    args = parser().parse_args(own)
    if not command or command == [commands.LAUNCH]:
        raise ConfigError("what is to run comes last, after two dashes: mmm submit … -- python3 -m mmm.trainer.lm …")
    # `mmm plan` prints these words for the user to replace.
    unfilled = {FOLDER, PROJECT} & {args.project, *command}
    if unfilled and not args.dry_run:
        raise ConfigError(f"{min(unfilled)} stands for what is yours: fill it in")
    script = make_script(args, command)
    print(script.text)
    if script.queue:
        print(f"mmm submit: {script.queue}", file=sys.stderr)
    if args.dry_run:
        line = shlex.join(queues.submit_words(script.scheduler, script.name))
        print(f"not submitted (--dry-run); it would be by: {line}")
        if script.folder is not None:
            line = shlex.join(queues.submit_words(script.scheduler, script.name, "ID"))
            print(f"{args.jobs} times, with the ID of the job before from the second on: {line}")
        return 0
    jobs = _submit(script, args.jobs or 1)
    print(f"submitted: {' '.join(jobs)}")
    if script.folder is not None:
        print(f"to follow: watch -n 5 mmm history {shlex.quote(str(script.folder))}")
        print(f"to stop:   {queues.QUEUES[script.scheduler].cancel} {' '.join(jobs)}")
    return 0


def make_script(args: argparse.Namespace, command: Sequence[str]) -> JobScript:
    """Returns the job script of the flags. Raises UserError: they do not fit each other, or the machine."""
    walltime = args.time
    before_end = args.before_end or commands.time_to_save(walltime)
    if before_end >= walltime:
        time = clock_time(walltime)
        raise ConfigError(f"--before-end {clock_time(before_end)}: the job has {time}, and would save at once")
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise ConfigError(f"--jobs {args.jobs}: it must be from 1 to {MOST_JOBS:,}")
    _check_word("--project", args.project)
    _check_word("--queue", args.queue)
    if not "".join(args.directive).isprintable():
        raise ConfigError(f"--directive {args.directive}: each is one line; repeat --directive for another")
    machine = _machine(args)
    scheduler = queues.QUEUES[machine.scheduler]
    begin = [f"cd {shlex.quote(os.getcwd())}"]
    # A container has a Python of its own.
    if not commands.starts_container(command):
        begin.append(_activation())
    directives = [f"{scheduler.directive} {text}" for text in args.directive]
    folder = None
    if args.jobs is not None:
        folder = commands.folder_of(command)
        command = commands.going_on(command, folder)
    line = commands.launch_line(command, walltime, before_end, args.stage)
    queue, why = _queue(machine, args.queue, args.nhosts, walltime)
    # What stands in braces in the machine's lines.
    fill = {"hosts": str(args.nhosts)}
    fill["time"] = clock_time(walltime)
    if machine.scheduler == "flux":
        fill["time"] = f"{walltime:.0f}s"
    if queue:
        fill["queue"] = queue
    if args.project:
        fill["project"] = args.project
    text = job_script(line, machine, fill, begin, directives)
    return JobScript(text, machine.scheduler, commands.name_of(command), folder, why)


def _queue(machine: Machine, asked: str | None, hosts: int, walltime: float) -> tuple[str, str]:
    """Returns a queue that takes the job, and why it is not the usual one.

    Raises:
        ConfigError: by the machine's file the queue that was asked for takes no such job, or none does.
    """
    queue = asked or queue_for(machine, hosts, walltime)
    why_not = not_taken(machine, queue, hosts, walltime)
    if why_not:
        raise ConfigError(f"{why_not}. Where the centre has changed that, correct it in a copy of {machine.file}")
    if asked or queue == machine.queue:
        return queue, ""
    usual_refuses = not_taken(machine, machine.queue, hosts, walltime)
    return queue, f"--queue {queue}: {usual_refuses}"


def _check_word(flag: str, value: str | None) -> None:
    """Raises ConfigError: the value would end a line for the scheduler, or begin another word of it."""
    if value is not None and not re.fullmatch(r"[\w@+=,./-]+", value):
        allowed = "letters, digits, @+=,./-_"
        raise ConfigError(f"{flag} {value!r}: it is a word of a line for the scheduler: {allowed}")


def _machine(args: argparse.Namespace) -> Machine:
    """Returns the machine, with the hosts and the modules that are asked for. Raises UserError."""
    machine, _ = find.find(os.environ, args.site)
    if 0 < machine.hosts < args.nhosts:
        raise ConfigError(f"-N {args.nhosts:,}: {machine.name} has {machine.hosts:,}")
    if machine.name and not machine.scheduler:
        raise ConfigError(f"--site {machine.name}: its file names no scheduler")
    # Somewhere else there are at least the scheduler's own commands.
    if not machine.name:
        machine = queues.unknown_machine(queues.scheduler_here(), args.queue, args.project)
    lines = "\n".join(machine.script)
    # A flag that the machine's lines have no place for would have no effect.
    for field in ("time", "project", "queue"):
        value = getattr(args, field)
        if value and f"{{{field}}}" not in lines:
            raise ConfigError(f"--{field} {value}: the script of machine {machine.name} has no {{{field}}}")
    if not args.project and ("{project}" in lines or "PROJECT" in lines):
        raise ConfigError(f"--project is missing: {machine.name} charges one")
    if "{queue}" in lines and not (args.queue or machine.queue):
        raise ConfigError(f"--queue is missing: {machine.name} has no usual one")
    if args.setup is not None:
        machine = replace(machine, setup=args.setup)
    return replace(machine, hosts=args.nhosts)


def _activation() -> str:
    """Returns the line that gives a job this Python, and the `mmm` and `launch` next to it."""
    if sys.prefix != sys.base_prefix:
        return f". {shlex.quote(sys.prefix)}/bin/activate"
    return f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"


def _submit(script: JobScript, count: int) -> list[str]:
    """Submit a script so many times, each job after the one before.

    Returns:
        The jobs' ids.

    Raises:
        LaunchError: the scheduler refuses a job. Those before it stay in the queue.
    """
    jobs: list[str] = []
    before = None
    for _ in range(count):
        try:
            before = queues.submit(script.scheduler, script.text, script.name, before)
        except LaunchError as error:
            if not jobs:
                raise
            waiting = " ".join(jobs)
            cancel = queues.QUEUES[script.scheduler].cancel
            raise LaunchError(
                f"{len(jobs)} of {count} jobs are submitted: {waiting} (to stop: {cancel} {waiting}). {error}"
            ) from None
        jobs.append(before)
    return jobs
