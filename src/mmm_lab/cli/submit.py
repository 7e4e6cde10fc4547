"""``mmm submit … -- COMMAND``: a job script of this machine, shown and submitted; or a job after the other, to the end
of the run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mmm.errors import ConfigError
from mmm.outside import printable_lines
from mmm_lab.campaign import command as commands
from mmm_lab.campaign import queues
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.sizes import clock_time, job_time, parse_time
from mmm_lab.planner.script import FOLDER, PROJECT, job_script
from mmm_launch.machines import find
from mmm_launch.machines.machine import Machine
from mmm_launch.machines.queues import not_taken, queue_for

EPILOG = """\
examples:
  mmm submit --site perlmutter -N 4 -t 6:00 --project m1234 --dry-run -- python3 -m mmm.trainer.lm --preset llama-1b
  mmm submit -N 4 -t 6:00 --project m1234 --until-done -- python3 -m mmm.trainer.lm … --checkpoint_every 500
  mmm submit --stop outputs/lm/2026-01-01-120000
COMMAND is started by launch, and may begin with it: `-- launch --stage env.tar python3 …`. docs/clusters.md says more.
"""
DEFAULT_JOBS, MOST_JOBS = 20, 1000


class JobScript(NamedTuple):
    """What is submitted.

    Attributes:
        name: of the job. folder: of the run, where jobs are chained.
        queue: why it is not the machine's usual one; empty where it is.
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
        description=__doc__,
        epilog=EPILOG,
    )
    add = made.add_argument
    add("--site", metavar="NAME", help="a known machine (mmm machine); default: the one that this is, or its scheduler")
    add("-N", "--hosts", metavar="N", type=int, default=1, help="hosts of a job (default: 1)")
    add("-t", "--time", metavar="TIME", help="of a job: 6h, 90m, or HOURS:MINUTES, such as 6:00")
    add("--project", "-A", metavar="P", help="that is charged")
    add("--queue", "-q", metavar="Q", help="default: the machine's usual one, or one that takes the job")
    add("--until-done", action="store_true", help="queue a job after the other until the run has made its steps")
    add("--jobs", metavar="N", type=int, default=DEFAULT_JOBS, help=f"at most so many (default: {DEFAULT_JOBS})")
    add("--before-end", metavar="TIME", help="that long before its end a job saves (default: 5m, or a tenth of -t)")
    add("--stage", metavar="PATH", help="an environment that launch copies to each host's own disk")
    add("--setup", metavar="LINE", action="append", help="of the script, instead of the machine's modules; repeatable")
    add(
        "--directive",
        metavar="TEXT",
        action="append",
        default=[],
        help="a line for the scheduler: --directive=--gpus-per-node=4",
    )
    add("--dry-run", "--show", action="store_true", help="print the script and what would submit it, and do nothing")
    add("--status", metavar="DIR", type=Path, help="the jobs that this run's folder has had, and which one waits")
    add("--stop", metavar="DIR", type=Path, help="no other job follows the one of this run's folder that runs")
    inside = made.add_argument_group("what a job's script calls")
    inside.add_argument("--begin", metavar="DIR", type=Path, help="queue the next job; exit code 1: nothing is to do")
    inside.add_argument("--end", nargs=2, metavar=("DIR", "CODE"), help="launch has ended so: is the next one needed?")
    return made


def main(argv: list[str]) -> int:
    """Show the script, and submit it. Returns 0, or what a script asks for. Raises UserError: before anything is
    written, or the scheduler takes no job."""
    place = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:place], argv[place + 1 :]
    args = parser().parse_args(own)
    if args.begin or args.end or args.stop or args.status:
        return _of_a_campaign(args)
    if not command or command == [commands.LAUNCH]:
        raise ConfigError("what is to run comes last, after two dashes: mmm submit … -- python3 -m mmm.trainer.lm …")
    unfilled = {FOLDER, PROJECT} & {args.project, *command}
    if unfilled and not args.dry_run:
        raise ConfigError(f"{min(unfilled)} stands for what is yours: fill it in")
    script = make_script(args, command)
    words = queues.submit_words(script.scheduler, script.name)
    print(script.text)
    if script.queue:
        print(f"mmm submit: {script.queue}", file=sys.stderr)
    if args.dry_run:
        print(f"not submitted (--dry-run); it would be by: {shlex.join(words)}")
        return 0
    print(f"submitted: job {_submit(script, args.jobs)}")
    if script.folder is not None:
        where = shlex.quote(str(script.folder))
        print(f"its jobs:  mmm submit --status {where}\nto follow: watch -n 5 mmm history {where}")
        print(f"to stop:   mmm submit --stop {where}")
    return 0


def make_script(args: argparse.Namespace, command: Sequence[str]) -> JobScript:
    """The job script of the flags. Raises UserError: they do not fit each other, or the machine."""
    if args.time is None:
        raise ConfigError("-t is missing: how long may a job take? Such as -t 6:00 (6 hours)")
    walltime = job_time(args.time, "-t")
    before_end = commands.time_to_save(walltime)
    if args.before_end is not None:
        before_end = parse_time(args.before_end, "--before-end")
    if before_end >= walltime:
        raise ConfigError(f"--before-end {args.before_end}: the job has {clock_time(walltime)}, and would save at once")
    if not 1 <= args.jobs <= MOST_JOBS:
        raise ConfigError(f"--jobs {args.jobs}: it must be from 1 to {MOST_JOBS:,}")
    _check_words({"--project": args.project, "--queue": args.queue})
    if not "".join(args.directive).isprintable():
        raise ConfigError(f"--directive {args.directive}: each is one line; repeat --directive for another")
    machine = _machine(args)
    words = queues.QUEUES[machine.scheduler]
    begin = [f"cd {shlex.quote(os.getcwd())}", _activation()]
    directives = [f"{words.directive} {text}" for text in args.directive]
    folder, after = None, ""
    if args.until_done:
        folder = commands.folder_of(command)
        _check_words({"--outdir": folder})
        command = commands.going_on(command, folder)
        where = shlex.quote(str(folder))
        directives.append(words.output.format(shlex.quote(str(folder / "jobs"))))
        begin.append(f"mmm submit --begin {where} || exit  # queues this script again, after this job")
        after = f"\nmmm submit --end {where} $?  # is the next job needed?"
    line = commands.launch_line(command, walltime, before_end, args.stage)
    queue, why = _queue(machine, args.queue, args.hosts, walltime)
    fill = {"hosts": str(args.hosts), "time": clock_time(walltime)}
    fill |= {name: value for name, value in (("queue", queue), ("project", args.project)) if value}
    text = job_script(line + after, machine, fill, begin, directives)
    return JobScript(text, machine.scheduler, commands.name_of(command), folder, why)


def _queue(machine: Machine, asked: str | None, hosts: int, walltime: float) -> tuple[str, str]:
    """A queue that takes the job, and why it is not the usual one.

    Raises:
        ConfigError: by the machine's file the queue that was asked for takes no such job, or none does.
    """
    queue = asked or queue_for(machine, hosts, walltime)
    why_not = not_taken(machine, queue, hosts, walltime)
    if why_not:
        raise ConfigError(f"{why_not}. Where the centre has changed that, correct it in a copy of {machine.file}")
    if asked or queue == machine.queue:
        return queue, ""
    return queue, f"--queue {queue}: {not_taken(machine, machine.queue, hosts, walltime)}"


def _check_words(flags: Mapping[str, object]) -> None:
    """What goes into the scheduler's lines ends none of them, and begins no other word. Raises ConfigError."""
    for flag, value in flags.items():
        if value is not None and not re.fullmatch(r"[\w@+=,./-]+", str(value)):
            raise ConfigError(
                f"{flag} {str(value)!r}: it is a word of a line for the scheduler: letters, digits, @+=,./-_"
            )


def _machine(args: argparse.Namespace) -> Machine:
    """With the hosts, and the modules, that are asked for. Raises UserError."""
    machine, _ = find.find(os.environ, args.site)
    if args.hosts < 1 or 0 < machine.hosts < args.hosts:
        most = f"{machine.name} has {machine.hosts:,}" if machine.hosts else "it must be at least 1"
        raise ConfigError(f"-N {args.hosts:,}: {most}")
    if machine.name and not machine.scheduler:
        raise ConfigError(f"--site {machine.name}: its file names no scheduler")
    if not machine.name:
        machine = queues.unknown_machine(queues.scheduler_here(), args.queue, args.project)
    lines = "\n".join(machine.script)
    given = (("-t", "time", args.time), ("--project", "project", args.project), ("--queue", "queue", args.queue))
    for flag, name, value in given:
        if value and f"{{{name}}}" not in lines:
            raise ConfigError(f"{flag} {value}: the script of machine {machine.name} has no {{{name}}}")
    if not args.project and ("{project}" in lines or "PROJECT" in lines):
        raise ConfigError(f"--project is missing: {machine.name} charges one")
    if "{queue}" in lines and not (args.queue or machine.queue):
        raise ConfigError(f"--queue is missing: {machine.name} has no usual one")
    return replace(machine, hosts=args.hosts, setup=machine.setup if args.setup is None else args.setup)


def _activation() -> str:
    """The line by which a job has this Python, and `mmm` and `launch` beside it."""
    if sys.prefix != sys.base_prefix:
        return f". {shlex.quote(sys.prefix)}/bin/activate"
    return f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"


def _submit(script: JobScript, most: int) -> str:
    """Submit a script; where jobs are chained, after what they need is in the run's folder. Returns the job's id."""
    if script.folder is None:
        return queues.submit(script.scheduler, script.text, script.name)
    from mmm_lab.campaign.chain import FILE, JOBS, Campaign, read  # reads records

    jobs = script.folder / JOBS
    if (jobs / FILE).exists() and not read(script.folder).over:
        raise ConfigError(
            f"{script.folder} has a campaign under way; end it before: "
            f"mmm submit --stop {shlex.quote(str(script.folder))}"
        )
    file = jobs / f"{script.name}.sh"
    job = ""
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        file.write_text(script.text, **queues.TEXT)
        Campaign(script.folder, script.scheduler, script.name, str(file), most).write()
        job = queues.submit(script.scheduler, script.text, script.name)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        if not job:  # nothing was submitted: no campaign is under way
            (jobs / FILE).unlink(missing_ok=True)
    return job


def _of_a_campaign(args: argparse.Namespace) -> int:
    from mmm_lab.campaign import chain

    if args.stop:
        print(printable_lines(f"mmm submit: {chain.stop(args.stop.expanduser().absolute())}"))
        return 0
    if args.status:
        print(printable_lines("\n".join(chain.status(args.status.expanduser().absolute()))))
        return 0
    if args.begin:
        goes, line = chain.begin(args.begin)
        print(f"mmm submit: {line}", flush=True)
        return 0 if goes else 1
    folder, code = args.end
    if not code.isdecimal() or len(code) > 3:
        raise ConfigError(f"--end {folder} {code}: the second is the exit code of launch, a number")
    exit_code, line = chain.end(Path(folder), int(code))
    print(f"mmm submit: {line}", flush=True)
    return exit_code
