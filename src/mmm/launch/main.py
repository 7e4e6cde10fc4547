"""The `launch` command."""

import argparse
import difflib
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from mmm.errors import LaunchError, UserError
from mmm.launch import local, started, target, wire

DEVICES = ("cpu", "cuda", "xpu", "mps")
MAX_RANKS = 4096
EPILOG = """\
CMD is started once per rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
OMP_NUM_THREADS set. `python` and `python3` mean the interpreter that launch is installed in; it imports torch once
and forks the ranks. A rank that fails ends all: its traceback is printed once, and its exit code is launch's.

examples:
  launch -n 4 python3 -m mmm.examples.fsdp_tp --tpsize 2
  launch -n 2 --device cpu python3 train.py --lr 0.1
  launch --dry-run python3 -m mmm.examples.fsdp_tp
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="launch", usage="launch [-n N] [--device D] [--no-prefork] [--dry-run] CMD …",
                   description="Start CMD as the ranks of one distributed program.", epilog=EPILOG,
                   formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("-n", "--nproc", metavar="N",
                      help="ranks to start (default: one per accelerator; without any, 4 on the CPU)")
    made.add_argument("--device", choices=DEVICES, help="device type the ranks use (default: what is found)")
    made.add_argument("--no-prefork", action="store_true", help="start each rank as a new process with its own imports")
    made.add_argument("--dry-run", action="store_true", help="print what would be started and why, and start nothing")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch` with these words (default: the command line's) and return its exit code."""
    begin = time.time()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words, begin)
    except UserError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:                    # before there are ranks; later it is passed on to them
        return 130


def _main(words: list[str], begin: float) -> int:
    options, command = split(words)
    args = parser().parse_args(options)
    nproc = None if args.nproc is None else _ranks(args.nproc)
    if not command:
        raise LaunchError("no command to launch.\n  Try: launch -n 4 python3 -m mmm.examples.fsdp_tp")
    what = target.parse(command)
    target.check(what)
    plan = local.plan(what, nproc=nproc, device=args.device, prefork=not args.no_prefork)
    plan.shared[wire.LINE_VARIABLE] = shlex.join(["launch", *words])
    plan.shared.update(started.variables(os.environ, begin))
    for note in plan.notes:
        print(f"launch: {note}", file=sys.stderr)
    if args.dry_run:
        from mmm.launch.imports import preloads

        print(local.describe(plan, [p.module for p in preloads(what)] if plan.fork else []))
        return 0
    from mmm.launch.supervise import supervise

    return supervise(plan)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """launch's own options, which come first, and CMD with everything after it. Raises `LaunchError` on others."""
    known = {option: action for action in parser()._actions for option in action.option_strings}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] not in ("-", "--"):
        word = words[place]
        name = word.partition("=")[0]
        if name not in known and not re.fullmatch(r"-n\d+", word):
            if name == "-m":
                raise LaunchError(f"-m is python's option, not launch's.\n"
                                  f"  Try: launch {shlex.join([*words[:place], 'python3', *words[place:]])}")
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise LaunchError(f"unknown option {name}.{hint} launch's options come before CMD: "
                              "-n/--nproc N, --device D, --no-prefork, --dry-run, --help.")
        takes_value = name in known and known[name].nargs is None and "=" not in word
        place += 2 if takes_value else 1
    rest = list(words[place:])
    return list(words[:place]), rest[1:] if rest[:1] == ["--"] else rest


def _ranks(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise LaunchError(f"-n {text}: not a number of ranks. Give a whole number, at least 1.")
    if not 1 <= int(text) <= MAX_RANKS:
        raise LaunchError(f"-n {text}: the number of ranks on a host must be from 1 to {MAX_RANKS}.")
    return int(text)


