"""``mmm dry-run WORLD_SIZE -- PROGRAM``: what a rank of a run of so many would hold and send, without devices."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mmm.errors import ConfigError
from mmm.runtime.ranks import whoami
from mmm_lab.cli.parser import Parser, count, split_at_dashes
from mmm_lab.cli.sizes import parse_bytes
from mmm_launch.program import target as targets
from mmm_launch.program.target import Target

if TYPE_CHECKING:
    from mmm_lab.planner.dry_run import DryRun

EXAMPLE = "mmm dry-run 1024 -- python3 -m mmm.trainer.lm --tp 4 --dataset random"
NO_PROGRAM = f"no program to run: give it after --, as in {EXAMPLE}"
EPILOG = f"""\
PROGRAM is a program that starts a run by mmm.trainer.start_run: python3 -m MODULE …, or python3 SCRIPT.py …, as for
`launch`. Its own checks, model, mesh, steps and optimizer run, on tensors without elements. Nothing is written; any
other program is refused before its first line.
docs/dry-run.md says what a dry run sees, and what it does not.

examples:
  {EXAMPLE}
  mmm dry-run 8 --memory 40GiB -- python3 train.py --tp 2
exit codes: 0 it runs, and fits; 1 it does not fit, ranks part, or it failed; 2 the run would be refused: why is said
"""
# What is made of a program.
Result = TypeVar("Result")
PYTHONS = ("python", "python3", sys.executable)


def main(argv: list[str]) -> int:
    """Make the dry run, and print what it found. Returns the exit code.

    Raises:
        UserError: wrong flags, or whatever the program refuses.
    """
    own, command = split_at_dashes(argv)
    # The parser would call the program an argument that it does not know.
    if own and not command and not {"-h", "--help"} & set(own):
        raise ConfigError(NO_PROGRAM)
    args = _parser().parse_args(own)
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        raise ConfigError(f"--rank {args.rank}: it is not between 0 and {args.world_size - 1}")
    budget = args.memory
    target = target_of(command)
    # Started by a launcher, only rank 0 makes it.
    if not whoami().is_main:
        return 0

    from mmm_lab.planner import dry_run_report  # imports torch

    parting: list[str] = []
    compared_ranks = ""
    if args.compare:
        from mmm_lab.planner.compare_ranks import compare_ranks

        compared = ended_well(target, lambda program: compare_ranks(program, args.world_size))
        if isinstance(compared, int):
            return compared
        dry, parting, compared_ranks = compared
    else:
        alone = dry_run_of(target, args.world_size, args.rank)
        if isinstance(alone, int):
            return alone
        dry = alone
    if budget is None:
        budget = _device_memory(dry.ranks[0].held.device)
    print(dry_run_report.text_of(dry, budget), flush=True)
    fits, _ = dry_run_report.verdict(dry, budget)
    for line in parting:
        print(f"ranks part: {line}")
    if args.compare:
        print(f"compared: {compared_ranks}", flush=True)
    return int(not fits or bool(parting))


def dry_run_of(target: Target, ranks: int, rank: int | None = None) -> DryRun | int:
    """Returns the dry run of a program; or the exit code, where the program ended or failed, and has said why.

    Raises UserError: it starts no run, or the run would be refused.
    """
    from mmm_lab.planner.dry_run import dry_run

    return ended_well(target, lambda program: dry_run(program, ranks, rank))


def ended_well(target: Target, work: Callable[[Callable[[], object]], Result]) -> Result | int:
    """Returns what `work` makes of the program; or the exit code, where the program has said why it ended or failed."""
    from mmm_lab.planner.dry_run import ProgramExited
    from mmm_lab.planner.no_harm import check_starts_a_run
    from mmm_launch.host.child import run_as_main

    check_starts_a_run(target)
    try:
        return work(partial(run_as_main, target))
    except ProgramExited as exited:
        return int(exited.args[0])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mmm dry-run",
        usage="mmm dry-run WORLD_SIZE [--rank R | --compare] [--memory SIZE] -- PROGRAM …",
        description="Say what a rank of a run of WORLD_SIZE ranks would hold and send, without its devices.",
        epilog=EPILOG,
    )
    parser.add_argument("world_size", metavar="WORLD_SIZE", type=count, help="number of ranks of the run")
    # --compare finds out itself which ranks to run.
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--rank",
        metavar="R",
        type=int,
        help="simulate rank R only (default: 0; for a pipeline also the largest and the last stage)",
    )
    either.add_argument(
        "--compare",
        action="store_true",
        help="find out which ranks differ, run one of each, and compare what members of a group call in it",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=parse_bytes,
        help="memory of a rank's device, such as 64GiB (default: that of the device here, if there is one)",
    )
    return parser


def target_of(command: Sequence[str]) -> Target:
    """Returns the program, taken apart as `launch` does. Raises UserError: this process cannot run it."""
    if not command:
        raise ConfigError(NO_PROGRAM)
    name = command[0]
    # The words after `python3`.
    python_argv = command
    if name in PYTHONS:
        python_argv = command[1:]
    elif not name.startswith("-") and not name.endswith(".py") and not Path(name).exists():
        raise ConfigError(f"{name}: give only the Python program, and nothing that starts ranks, as in {EXAMPLE}")
    target = targets.from_tail(python_argv)
    if target is None:
        raise ConfigError(f"{shlex.join(command)}: it names no module and no script to run; as in {EXAMPLE}")
    # Flags of Python's own, such as -X dev, are of the process.
    if target.flags:
        flags = shlex.join(target.flags)
        raise ConfigError(f"{flags}: the program runs in this process: python3 {flags} -m mmm_lab.cli.main dry-run …")
    targets.check(target)
    return target


def _device_memory(kind: str) -> int | None:
    """Returns the bytes of the device of this host that the run would take. None on a CPU."""
    from mmm.runtime.device import choose_device
    from mmm.runtime.memory import device_memory

    if kind == "cpu":
        return None
    return device_memory(choose_device(kind, whoami()))
