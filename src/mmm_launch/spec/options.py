"""Reads launch's command line: its options, and CMD."""

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from mmm_launch.errors import LaunchError, did_you_mean
from mmm_launch.spec import hosts as host_lists
from mmm_launch.spec import mpi as mpis
from mmm_launch.spec import scheduler as schedulers
from mmm_launch.spec.stage import Stage

# The longest time that an option takes, in seconds.
LONGEST = 1e9
DEVICES = ("cpu", "cuda", "xpu", "mps")
SET_BY_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EPILOG = """\
CMD is started once per rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
OMP_NUM_THREADS set. `python` and `python3` mean the interpreter that launch is installed in; it imports torch once
and forks the ranks. A rank that fails ends all: its traceback is printed once, and its exit code is launch's.

Inside a job of PBS, Slurm or Flux (and with --hosts or --hostfile), mpiexec, srun or flux run starts the ranks on all
hosts. --dry-run says where each value came from, docs/clusters.md in which order they are looked for.

examples:
  launch -n 4 python3 -m mmm.examples.fsdp_tp --tp 2
  launch --dry-run python3 -m mmm.examples.fsdp_tp
  launch --hosts node1,node2 -ppn 4 python3 -m mmm.examples.fsdp_tp --tp 4
exit codes: 0 all ranks ended well, 2 wrong arguments, 124 --timeout, 130 Ctrl-C; else that of the first failed rank
"""


@dataclass(frozen=True)
class Elastic:
    """What --elastic MIN:MAX asks for.

    Attributes:
        least: the smallest number of ranks that the run may continue with.
        most: the largest number of ranks. The run begins with it.
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


# The types of options. argparse puts the option's name in front of their messages.


def count(text: str, least: int = 0) -> int:
    # int() would also take " 1 ", "1_000" and digits of other scripts.
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, at least {least}")
    return int(text)


def positive(text: str) -> int:
    return count(text, 1)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # NaN fails this comparison as well.
    if not 0 < value < LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, greater than 0")
    return value


def path(text: str) -> str:
    full = os.path.expanduser(os.path.expandvars(text))
    variable = re.search(r"\$\{?\w+", full)
    if variable:
        raise argparse.ArgumentTypeError(f"{text}: the variable {variable[0]} is not set")
    return full


def host_names(text: str) -> list[str]:
    return list(host_lists.parse_list(text))


def min_and_max(text: str) -> Elastic:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text} is not MIN:MAX, the fewest and the most ranks, such as 2:8")
    return Elastic(int(match[1]), int(match[2]))


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    if name in SET_BY_LAUNCH:
        raise argparse.ArgumentTypeError(f"{name} is what launch sets")
    return name, value


def option(help: str, *flags: str, default: Any = None, **arguments: Any) -> Any:
    """Declare a field of `LaunchOptions` that is an option of the command line.

    Args:
        help: what `launch --help` says of it.
        flags: its names. None: two dashes and the name of the field.
        arguments: further arguments of argparse's ``add_argument``.
    """
    return field(default=default, metadata={"help": help, "flags": flags, **arguments})


@dataclass
class LaunchOptions:
    """The options of the command line. None or empty: the option was not given.

    Attributes:
        command: CMD and its arguments.
        attempt: number of the attempt, from 0.
        places: in a later attempt, host → numbers of the places in use on it.
        archive: the archive that hosts unpack, once --stage has written it.
    """

    command: list[str] = field(default_factory=list)
    nproc: int | None = option(
        "ranks to start (default: one per accelerator; without any, 4 on the CPU)",
        "-n",
        "--nproc",
        metavar="N",
        type=positive,
    )
    device: str | None = option("device type the ranks use (default: what is found)", choices=DEVICES)
    no_prefork: bool = option(
        "start each rank as a new process with its own imports", default=False, action="store_true"
    )
    cpu_bind: str | None = option("none, cores, or list:0-3:4-7:… (CPUs of local rank 0, 1, …)", metavar="HOW")
    variables: Sequence[tuple[str, str]] | None = option(
        "a variable for every rank; repeatable", "--env", metavar="K=V", action="append", type=variable
    )
    timeout: float | None = option("end a run that has printed nothing for S seconds", metavar="S", type=seconds)
    retries: int | None = option(
        "start CMD again after a failure, up to N times (default: 0), without a host that is to blame",
        metavar="N",
        type=count,
    )
    elastic: Elastic | None = option(
        "begin with MAX ranks; after a failure continue with the survivors while at least MIN remain",
        metavar="MIN:MAX",
        type=min_and_max,
    )
    grace: float | None = option(
        "seconds that ranks have to save when Ctrl-C or SIGTERM ends launch (default: 60 if they save, else 1)",
        metavar="S",
        type=seconds,
    )
    dry_run: bool = option("print what would be started and why, and start nothing", default=False, action="store_true")
    # On a cluster.
    ppn: int | None = option("ranks on each host", "-ppn", "--ppn", metavar="N", type=positive)
    nhosts: int | None = option("use the first N hosts", "-N", "--nhosts", metavar="N", type=positive)
    hosts: str | None = option("use these hosts; inside a job, hosts of that job", metavar="A,B")
    hostfile: str | None = option("use the hosts in FILE, one on each line", metavar="FILE", type=path)
    spare_hosts: Sequence[str] = option(
        "with --retries or --elastic: hosts that take the place of bad ones (default: hosts of the job not in use)",
        default=(),
        metavar="C,D",
        type=host_names,
    )
    scheduler: str | None = option(
        "use this scheduler's job (none: ignore all jobs)", choices=(*schedulers.SCHEDULERS, "none")
    )
    site: str | None = option("use this known machine's data, whatever the environment says", metavar="NAME")
    mpiexec: str | None = option("the mpiexec to use (also inside a Slurm job)", metavar="PATH")
    mpi: str | None = option("kind of mpiexec, if its --version does not tell", choices=mpis.FLAVOURS)
    launcher_args: Sequence[str] = option(
        "more options for mpiexec or srun", default=(), metavar="'…'", type=shlex.split
    )
    start_timeout: float = option(
        "seconds in which all hosts have to connect (default: 300)", default=300.0, metavar="S", type=seconds
    )
    stage: str | None = option(
        "unpack this environment (a folder, or a tar file) on every host; ranks run it", metavar="PATH", type=path
    )
    stage_to: str | None = option("folder on each host for --stage (default: its temporary folder)", metavar="DIR")
    # Filled in between attempts.
    attempt: int = 0
    places: dict[str, list[int]] = field(default_factory=dict)
    archive: Stage | None = None

    @property
    def env(self) -> dict[str, str]:
        """The variables of --env, by name. The last value of a name counts."""
        return dict(self.variables or ())


class Parser(argparse.ArgumentParser):
    """A parser that raises `LaunchError` instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        hint = did_you_mean(unknown, self._option_string_actions)
        raise LaunchError(f"{message}.{hint} launch's options come before CMD; launch --help has them.")


class Once(argparse.Action):
    """Stores the value of an option that may be given once: of two values, one would be lost."""

    is_given = False

    def __call__(self, parser: Any, options: Any, value: Any, option: str | None = None) -> None:
        if self.is_given:
            parser.error(f"argument {option}: it is given twice")
        self.is_given = True
        setattr(options, self.dest, value)


def parser() -> Parser:
    """The parser of launch's command line. Its namespace is `LaunchOptions`."""
    made = Parser(
        prog="launch",
        usage="launch [OPTIONS] CMD …",
        description="Start CMD as the ranks of one distributed program.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # `--n` must not mean `--nproc` today and another option tomorrow.
        allow_abbrev=False,
    )
    made.register("action", None, Once)
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD", help="what each rank runs")
    group: Any = made
    for declared in fields(LaunchOptions):
        arguments = dict(declared.metadata)
        if not arguments:
            continue
        if declared.name == "ppn":
            group = made.add_argument_group("on a cluster")
        flags = arguments.pop("flags") or (f"--{declared.name.replace('_', '-')}",)
        group.add_argument(*flags, dest=declared.name, **arguments)
    return made


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Read a command line. Raises `LaunchError`."""
    options = parser().parse_args(argv, namespace=LaunchOptions())
    # `launch -n 2 -- CMD`: argparse leaves the two dashes in front of CMD.
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.elastic is not None:
        if options.nproc not in (None, options.elastic.most):
            raise LaunchError(f"-n {options.nproc} --elastic {options.elastic}: leave -n out")
        options.nproc = options.elastic.most
    elif options.spare_hosts and not options.retries:
        raise LaunchError("--spare-hosts needs --retries N or --elastic MIN:MAX, which are not given.")
    if options.stage_to is not None and options.stage is None:
        raise LaunchError("--stage-to: there is no --stage PATH to copy.")
    return options


def recorded(argv: Sequence[str], options: LaunchOptions) -> str:
    """Return the command line for a run's record, without the values of --env: they may be passwords."""
    hidden = {}
    for name, value in options.variables or ():
        hidden[f"{name}={value}"] = f"{name}=…"
        hidden[f"--env={name}={value}"] = f"--env={name}=…"
    own = argv[: len(argv) - len(options.command)]
    shown = [hidden.get(argument, argument) for argument in own]
    return shlex.join(["launch", *shown, *options.command])
