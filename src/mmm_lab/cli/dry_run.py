"""``mmm dry-run WORLD_SIZE -- PROGRAM``: what a rank of a run of so many would hold and send, without devices."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mmm.errors import ConfigError
from mmm.runtime.ranks import whoami
from mmm_lab.cli.parser import Parser
from mmm_lab.cli.sizes import parse_bytes
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target

if TYPE_CHECKING:
    from mmm_lab.planner.dry_run import DryRun

LINE = "mmm dry-run 1024 -- python3 -m mmm.trainer.lm --tpsize 4 --dataset random"
EPILOG = f"""\
PROGRAM is what `launch` would run: python3 -m MODULE …, or python3 SCRIPT.py …; it starts its run by
mmm.trainer.start_run. Its own checks, model, mesh, steps and optimizer run, on tensors without elements.
  {LINE}
Exit code 0: it runs, and fits. 1: it does not fit. 2: the run would be refused, with the same message.
docs/plan.md says what a dry run sees, and what it does not.
"""
NOT_FITTING_EXIT = 1
FAILED_EXIT = 1
LAUNCHERS = ("launch", "mpiexec", "mpirun", "srun", "torchrun")
VALUED = ("--rank", "--memory")  # flags that take a value
PYTHONS = ("python", "python3", sys.executable)


def main(argv: list[str]) -> int:
    """Make the dry run, and print what it found; of several ranks here, rank 0 does. Returns the exit code.

    Raises:
        UserError: wrong flags, or whatever the program refuses.
    """
    own, command = split(argv)
    parser = _parser()
    args = parser.parse_args(own)
    if args.world_size < 1:
        raise ConfigError(f"mmm dry-run {args.world_size}: it must be at least 1 rank")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        raise ConfigError(f"--rank {args.rank}: it is not between 0 and {args.world_size - 1}")
    budget = None if args.memory is None else int(parse_bytes(args.memory, "--memory"))
    target = target_of(command)
    if not whoami().is_main:
        return 0

    from mmm_lab.planner import dry_run_report  # imports torch

    found = dry_run_of(target, args.world_size, args.rank)
    if isinstance(found, int):
        return found
    if budget is None:
        budget = _device_memory(found.ranks[0].device)
    print(dry_run_report.text_of(found, budget), flush=True)
    return 0 if dry_run_report.verdict(found, budget)[0] else NOT_FITTING_EXIT


def dry_run_of(target: Target, ranks: int, rank: int | None = None) -> DryRun | int:
    """The dry run of a program; or the exit code, where it has none, and has said why."""
    from mmm_lab.planner.dry_run import ProgramExited, dry_run
    from mmm_launch.host.child import run_as_main

    try:
        return dry_run(partial(run_as_main, target), ranks, rank)
    except ProgramExited as exited:
        return int(exited.args[0])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return FAILED_EXIT


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mmm dry-run",
        usage="mmm dry-run WORLD_SIZE [--rank R] [--memory SIZE] -- PROGRAM …",
        description=__doc__,
        epilog=EPILOG,
    )
    parser.add_argument("world_size", metavar="WORLD_SIZE", type=int, help="ranks of the run")
    parser.add_argument(
        "--rank", metavar="R", type=int, help="this one alone (0; of a pipeline also the largest and the last stage)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="of a rank's device, such as 64GiB (what the device here has, if there is one)"
    )
    return parser


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the program's, which begin after ``--``, or after WORLD_SIZE and the flags there."""
    place, positionals = 0, 0
    while place < len(words) and words[place] != "--":
        word = words[place]
        takes_value = word in VALUED and words[place + 1 : place + 2] != ["--"]
        positionals += not word.startswith("--")
        if positionals == 2:
            return list(words[:place]), list(words[place:])
        place += 1 + takes_value
    return list(words[:place]), list(words[place + 1 :])


def target_of(command: Sequence[str]) -> Target:
    """The program, as `launch` takes it apart. Raises UserError where there is none that this process can run."""
    if not command:
        raise ConfigError(f"no program to run: give it after --, as in {LINE}")
    name = command[0]
    if name in LAUNCHERS:
        raise ConfigError(f"{name} starts ranks, and a dry run needs none: give the program alone, as in {LINE}")
    of_python = name in PYTHONS
    if not of_python and not name.startswith("-") and not name.endswith(".py") and not Path(name).exists():
        raise ConfigError(f"{name}: it is no Python program, and only those can be tried; as in {LINE}")
    target = targets.from_tail(command[1:] if of_python else command)
    if target is None:
        raise ConfigError(f"{shlex.join(command)}: it names no module and no script to run; as in {LINE}")
    if target.flags:
        flags = shlex.join(target.flags)
        raise ConfigError(f"{flags}: the program runs in this process: python3 {flags} -m mmm_lab.cli.main dry-run …")
    targets.check(target)
    return target


def _device_memory(kind: str) -> int | None:
    """Bytes of the device of this host that the run would take; None on a CPU."""
    from mmm.runtime.device import choose_device
    from mmm.runtime.memory import device_memory

    return None if kind == "cpu" else device_memory(choose_device(kind, whoami()))
