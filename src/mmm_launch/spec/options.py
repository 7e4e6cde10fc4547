"""launch's command line: its options, and how they are told from CMD's."""

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mmm_launch.errors import LaunchError
from mmm_launch.spec import hosts, mpi, scheduler, stage
from mmm_launch.spec.stage import Stage


@dataclass(frozen=True)
class Elastic:
    """What --elastic asks for.

    Attributes:
        least, most: numbers of ranks that the run may go on with. It begins with the most.
        spare: hosts that take the place of those that are lost.
    """

    least: int
    most: int
    spare: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.least} to {self.most} ranks" + (f"; spare: {' '.join(self.spare)}" if self.spare else "")


def elastic_of(words: str | None, spare: str | None, nproc: int | None, retries: int | None) -> Elastic | None:
    """What the command line asks for; None where it is not asked for. Raises `LaunchError`."""
    if words is None:
        if spare is not None:
            raise LaunchError("--spare-hosts is of --elastic MIN:MAX, which is not given.")
        return None
    match = re.fullmatch(r"(\d+):(\d+)", words)
    if match is None:
        raise LaunchError(f"--elastic {words}: write MIN:MAX, the fewest and the most ranks, such as 2:8.")
    least, most = int(match[1]), int(match[2])
    if not 1 <= least <= most:
        raise LaunchError(f"--elastic {words}: MIN has to be from 1 to MAX.")
    if nproc not in (None, most):
        raise LaunchError(f"-n {nproc} --elastic {words}: it begins with MAX ranks. Leave -n out.")
    if retries == 0:
        raise LaunchError(f"--retries 0 --elastic {words}: the run could not go on.")
    return Elastic(least, most, tuple(hosts.parse_list(spare)) if spare else ())


def check_spare_hosts(spare: Sequence[str], used: Sequence[str], of_job: Sequence[str]) -> None:
    """Raise `LaunchError` where --spare-hosts are none."""
    short = {hosts.host_key(name) for name in of_job}
    for name in spare:
        if name in used:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is to have ranks from the beginning.")
        if short and hosts.host_key(name) not in short:
            raise LaunchError(f"--spare-hosts {','.join(spare)}: {name} is not among the job's hosts.")


DEVICES = ("cpu", "cuda", "xpu", "mps")
SET_BY_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MAX_RANKS = 4096  # on one host
EPILOG = """\
CMD is started once per rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
OMP_NUM_THREADS set. `python` and `python3` mean the interpreter that launch is installed in; it imports torch once
and forks the ranks. A rank that fails ends all: its traceback is printed once, and its exit code is launch's.

Inside a PBS or Slurm job (and with --hosts or --hostfile), mpiexec or srun starts the ranks on all hosts. --explain
says where each value came from, docs/clusters.md in which order they are looked for.

examples:
  launch -n 4 python3 -m mmm.examples.fsdp_tp --tpsize 2
  launch -n 2 --device cpu python3 train.py --lr 0.1
  launch --dry-run python3 -m mmm.examples.fsdp_tp
  launch --hosts node1,node2 -ppn 4 python3 -m mmm.examples.fsdp_tp --tpsize 4
  launch --timeout 600 --retries 2 --signal USR1@120 python3 train.py
"""


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line asks for; None or empty: not said."""

    nproc: int | None = None
    per_host: int | None = None
    nhosts: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    scheduler: str | None = None
    site: str | None = None
    mpiexec: str | None = None
    mpi: str | None = None
    launcher_args: tuple[str, ...] = ()
    cpu_bind: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    prefork: bool = True
    stage: Stage | None = None
    attempt: int = 0
    elastic: Elastic | None = None
    places: dict[str, list[int]] = field(default_factory=dict)  # of a later attempt: host → its places in use

    @property
    def spare(self) -> tuple[str, ...]:
        return self.elastic.spare if self.elastic is not None else ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="launch",
        usage="launch [OPTIONS] CMD …",
        description="Start CMD as the ranks of one distributed program.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(made)
    _add_cluster(made)
    return made


def _add_run(made: argparse.ArgumentParser) -> None:
    """What a run takes on one host, too."""
    made.add_argument(
        "-n", "--nproc", metavar="N", help="ranks to start (default: one per accelerator; without any, 4 on the CPU)"
    )
    made.add_argument("--device", choices=DEVICES, help="device type the ranks use (default: what is found)")
    made.add_argument("--no-prefork", action="store_true", help="start each rank as a new process with its own imports")
    made.add_argument(
        "--cpu-bind",
        metavar="HOW",
        help="none, cores, or list:0-3:4-7:… (CPUs of local rank 0, 1, …)",
    )
    made.add_argument("--env", metavar="K=V", action="append", default=[], help="a variable for every rank; repeatable")
    made.add_argument("--timeout", metavar="S", help="end a run that has printed nothing for S seconds")
    made.add_argument("--retries", metavar="N", help="start CMD again after a failure, up to N times (default: 0)")
    made.add_argument(
        "--elastic",
        metavar="MIN:MAX",
        help="begin with MAX ranks; go on from the last checkpoint with those that are left, if there are MIN",
    )
    made.add_argument(
        "--signal", metavar="NAME@S", help="send every rank signal NAME (USR1, TERM, …) S seconds before the job's end"
    )
    made.add_argument("--walltime", metavar="HH:MM:SS", help="when the job ends, from now on, for --signal")
    made.add_argument(
        "--stage",
        metavar="PATH",
        help="unpack this environment (a folder, or a tar file) on every host; ranks run from it",
    )
    made.add_argument("--stage-to", metavar="DIR", help="where to on each host (default: its temporary folder)")
    made.add_argument(
        "--grace",
        metavar="S",
        help="seconds that ranks have to save when Ctrl-C or SIGTERM ends launch (default: 60 if they save, else 1)",
    )
    made.add_argument(
        "--dry-run", "--explain", action="store_true", help="print what would be started and why, and start nothing"
    )


def _add_cluster(made: argparse.ArgumentParser) -> None:
    many = made.add_argument_group("on a cluster")
    many.add_argument("-ppn", "--ppn", metavar="N", help="ranks on each host")
    many.add_argument("-N", "--nhosts", metavar="N", help="use the first N hosts")
    many.add_argument("--hosts", metavar="A,B", help="these hosts (of the job, inside one)")
    many.add_argument("--hostfile", metavar="FILE", help="the hosts in FILE, one a line")
    many.add_argument("--spare-hosts", metavar="C,D", help="with --elastic: hosts that take the place of lost ones")
    many.add_argument(
        "--scheduler", choices=(*scheduler.SCHEDULERS, "none"), help="take this one's job (none: no job's)"
    )
    many.add_argument("--site", metavar="NAME", help="use a known machine's data whatever the environment says")
    many.add_argument("--mpiexec", metavar="PATH", help="the mpiexec to use (also inside a Slurm job)")
    many.add_argument("--mpi", choices=mpi.FLAVOURS, help="what kind it is, if --version does not tell")
    many.add_argument("--launcher-args", metavar="'…'", default="", help="further words for mpiexec or srun")
    many.add_argument("--start-timeout", metavar="S", default="300", help="seconds until all ranks have to be there")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """launch's own options, which come first, and CMD with everything after it. Raises `LaunchError` on others."""
    known = {option: action for action in parser()._actions for option in action.option_strings}
    place, given = 0, list[str]()
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
        word = words[place]
        name = word.partition("=")[0]
        if name not in known and not re.fullmatch(r"-[nN]\d+", word):
            hint = "\n  -m is python's: launch python3 -m MODULE …" if name == "-m" else ""
            raise LaunchError(f"unknown option {name}. launch's options come before CMD; launch --help has them.{hint}")
        takes_value = name in known and known[name].nargs is None and "=" not in word
        if takes_value and word.startswith("--") and place + 1 < len(words):
            given.append(f"{word}={words[place + 1]}")  # argparse takes no value that begins with -
        else:
            given += words[place : place + 1 + takes_value]
        place += 1 + takes_value
    rest = list(words[place:])
    return given, rest[1:] if rest[:1] == ["--"] else rest


def launch_options(args: argparse.Namespace) -> LaunchOptions:
    """The options that say where ranks run, checked one by one. Raises `LaunchError`."""
    try:
        more = tuple(shlex.split(args.launcher_args))
    except ValueError as error:
        raise LaunchError(f"--launcher-args {args.launcher_args!r}: {error}.") from None
    nproc, retries = count("-n", args.nproc), count("--retries", args.retries, least=0)
    wanted = elastic_of(args.elastic, args.spare_hosts, nproc, retries)
    return LaunchOptions(
        nproc=nproc if wanted is None else wanted.most,
        per_host=count("-ppn", args.ppn),
        nhosts=count("-N", args.nhosts),
        hosts=args.hosts,
        hostfile=args.hostfile,
        scheduler=args.scheduler,
        site=args.site,
        mpiexec=args.mpiexec,
        mpi=args.mpi,
        launcher_args=more,
        cpu_bind=args.cpu_bind,
        env=dict(_variable(text) for text in args.env),
        device=args.device,
        prefork=not args.no_prefork,
        stage=stage.from_words(args.stage, args.stage_to),
        elastic=wanted,
    )


def count(name: str, text: str | None, least: int = 1) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"-?\d+", text) or int(text) < least:
        raise LaunchError(f"{name} {text}: it has to be a whole number, at least {least}.")
    return int(text)


def seconds(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise LaunchError(f"{name} {text}: it has to be a number of seconds, greater than 0.")
    return value


def untold(words: Sequence[str]) -> list[str]:
    """A command line for records: the variables of `--env` are named, their values are not told."""
    given, command = split(words)
    return [*(re.sub(r"^(--env=[^=]*=).*", r"\1…", word, flags=re.DOTALL) for word in given), *command]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise LaunchError(f"--env {text}: write NAME=VALUE.")
    if name in SET_BY_LAUNCH:
        raise LaunchError(f"--env {text}: {name} is what launch sets.")
    return name, value
