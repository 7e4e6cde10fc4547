"""``mmm-verify --program train.py``: the command line of a script that is verified without a change."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmm_verify.errors import ConfigError

FLAG = "--program"
EPILOG = """\
The flags above are read wherever they stand. Everything else after FILE is an argument of the script, in its order, and
so is everything after a --, which is not passed on:

  %(prog)s --program train.py --lr 0.1 --ranks 1,4
  %(prog)s --ranks 1,4 --program train.py -- --timeout 5
  %(prog)s --ranks 1,2 --program -m package.train --batch-size 8 --one-rank-args "--batch-size 16"
  %(prog)s --program train.py --resume "train.py --from checkpoints/last.pt" --stop-after 10

The script runs as torchrun would start it, in the working directory, on CPU ranks of this host: on one rank, on N
ranks, and on one rank again to measure how far rounding moves its numbers. Each run is ended after its second optimizer
step. What the script writes until then, it writes. docs/verify-unedited.md says more.

With --resume, the script runs in copies of the working directory: until it has done --stop-after steps and what
follows them, where it is killed; then by the line of --resume, for as many steps; and twice as many without a stop.
Give the same line where a script finds its checkpoint itself. docs/verify-resume.md says more.

exit codes: 0 the same; 1 not the same; 2 not comparable, not parallel, or wrong arguments
"""


class Once(argparse.Action):
    """Stores the value of a flag that may be given once. Of several, only the last one would count."""

    def __call__(self, parser: Any, args: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        mark = f"{self.dest} is given"
        if hasattr(args, mark):
            raise ConfigError(f"{flag} {value} is the second {flag}: give it once")
        setattr(args, mark, True)
        setattr(args, self.dest, value)


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that go with a script as with functions."""
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that each run may take (default: 120)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the verdict, with versions, hashes and the command line"
    )


def names_a_program(argv: Sequence[str]) -> bool:
    """Whether a command line has --program."""
    return any(argument == FLAG or argument.startswith(f"{FLAG}=") for argument in argv)


def _parser(program: str, add_help: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s --program FILE [ARGS] [--ranks 1,N] [more flags]",
        description="Does an unedited script compute the same on several ranks as on one?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A script's --time is not --timeout.
        allow_abbrev=False,
        add_help=add_help,
    )
    parser.register("action", None, Once)
    parser.add_argument("--ranks", metavar="1,N", help="the numbers of ranks to compare (default: 1,4)")
    parser.add_argument(
        "--resume",
        metavar="'FILE ARGS'",
        help="instead, compare a stop and a new start by this line with a run without a stop, on --ranks (default: 1)",
    )
    parser.add_argument(
        "--stop-after",
        type=int,
        default=4,
        metavar="N",
        help="with --resume, the step of the stop, by which the script has saved (default: 4)",
    )
    parser.add_argument(
        "--one-rank-args",
        default="",
        metavar="'ARGS'",
        help="arguments of the script on one rank, after or in place of its own, such as a batch size N times as large",
    )
    parser.add_argument("--verbose", action="store_true", help="show what rank 0 of each run prints")
    add_shared_flags(parser)
    return parser


def main(argv: Sequence[str], program: str) -> int:
    """Run the command. Returns the exit code.

    Args:
        argv: the arguments, with --program among them.
        program: the command's name, for messages.

    Raises:
        UserError: an argument is wrong.
    """
    # These modules import torch, which takes seconds: --help does not wait for it.
    args, script = parse(argv, program)
    from mmm_verify.program.resume import verify_resume
    from mmm_verify.program.run import verify_program
    from mmm_verify.verdict import write_json

    shown = {"timeout": args.timeout, "verbose": args.verbose}
    if args.resume is None:
        verdict = verify_program(script, args.ranks, one_rank_args=args.one_rank_args, **shown)
    else:
        verdict = verify_resume(script, args.resume, args.ranks[0], steps=args.stop_after, **shown)
    print(verdict, flush=True)
    if verdict.details:
        print(verdict.details.rstrip(), flush=True)
    if args.json is not None:
        write_json([verdict], script, args.json)
    return verdict.exit_code


def parse(argv: Sequence[str], program: str) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into this command's flags and the script with its arguments.

    Raises:
        ConfigError: something stands before --program that is no flag, no script follows it, or --ranks is no list of
            numbers.
    """
    # --program=FILE is --program FILE.
    arguments = []
    for argument in argv:
        if argument.startswith(f"{FLAG}="):
            arguments += [FLAG, argument.removeprefix(f"{FLAG}=")]
        else:
            arguments.append(argument)
    place = arguments.index(FLAG)
    before = arguments[:place]
    after = arguments[place + 1 :]
    # --help before the script asks this command; after it, the script.
    if after[:1] in (["-h"], ["--help"]):
        before += after
    args, unknown = _parser(program, add_help=True).parse_known_args(before)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} stands before --program and is no flag that goes with it: arguments of the script come "
            "after its file; a MODEL is verified without --program"
        )
    n_script = 2 if after[:1] == ["-m"] else 1
    script = after[:n_script]
    if len(script) < n_script or script[-1].startswith("-"):
        raise ConfigError("--program names no script: write --program train.py, or --program -m package.module")
    rest = after[n_script:]
    literal = []
    if "--" in rest:
        place = rest.index("--")
        literal = rest[place + 1 :]
        rest = rest[:place]
    args, own = _parser(program, add_help=False).parse_known_args(rest, args)
    expected = "1 and the number of ranks to compare with, such as 1,4"
    if args.resume is not None:
        expected = "one number with --resume, as all runs have the same ranks"
    ranks = args.ranks or ("1,4" if args.resume is None else "1")
    try:
        args.ranks = [int(count) for count in ranks.split(",")]
        if args.resume is not None:
            (_,) = args.ranks
    except ValueError:
        raise ConfigError(f"--ranks {ranks}: write {expected}") from None
    args.one_rank_args = shlex.split(args.one_rank_args)
    if args.resume is not None:
        args.resume = shlex.split(args.resume)
        name = " ".join(args.resume[:1])
        if args.one_rank_args:
            raise ConfigError("--resume goes without --one-rank-args: all runs have the same ranks")
        if name != "-m" and not name.endswith(".py"):
            raise ConfigError(
                f"--resume {name}: write the line of the new start, such as --resume 'train.py --from last.pt'; "
                "--ranks starts its ranks, and a --resume of the script itself comes after --"
            )
    return args, script + own + literal
