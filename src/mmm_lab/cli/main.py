"""``mmm SUBCOMMAND …``"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

from mmm import __version__
from mmm.errors import LaunchError, UserError
from mmm.outside import printable_lines
from mmm_launch.contract import missing_folder
from mmm_launch.errors import UserError as LaunchUserError
from mmm_launch.errors import did_you_mean
from mmm_verify.errors import UserError as VerifyUserError

# Subcommand → a line for the list. Its module has main(argv) → exit code.
SUBCOMMANDS = {
    "diverge": "the first step at which two runs part, whatever their layouts, and where in it",
    "doctor": "check this machine and this installation, with a fix for what is wrong",
    "draw": "a layout as a picture: what each rank holds, what it sends, and when",
    "dry-run": "what one rank of many would hold and send: any program, without its devices",
    "examples": "list the runnable examples and trainers",
    "exercise": "ten small things to write, each with a check that says where an answer is wrong",
    "export": "write a language model's weights as transformers loads them",
    "history": "show the record of a run: finished, running or killed",
    "import": "a language model's weights, as transformers writes them, as a checkpoint",
    "machine": "list known machines; measure this one, and describe it in a file",
    "plan": "which layouts fit a machine, what they need, send and take, before a job is queued",
    "rerun": "start a run again by its record, with other values of some flags",
    "runs": "a table of many runs: state, steps, losses, rates, hours, and the flags that differ",
    "sample": "text from a language model, on one device or sharded over ranks",
    "startup": "how long runs took to start, from their records or from other programs' logs",
    "submit": "a job script, shown and submitted; or one job after another until a run is done",
    "tokens": "prepare a file of tokens from text, in parallel, to train on",
    "verify": "does a parallel program compute what its model does on one device? Anyone's model",
}
# Subcommands whose module is not called as they are.
MODULES = {"examples": "mmm.examples.__main__", "import": "mmm_lab.cli.import_"}
HELP = ("-h", "--help")
VERSION = ("-V", "--version")
# What standard output's file or disk may refuse.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _usage() -> str:
    commands = "\n".join(f"  {name:<12} {about}" for name, about in SUBCOMMANDS.items())
    return f"""\
usage: mmm SUBCOMMAND [ARGUMENTS]      (mmm SUBCOMMAND --help says more)

{commands}

To start a program on many ranks: launch --help

examples:
  mmm doctor
  mmm plan --model llama-8b --site polaris --nhosts 4 --global-batch 64
  mmm history outputs/lm/2026-01-01-120000
exit codes: 0 done; 1 the answer is no, as each --help says; 2 wrong arguments or input; 130 interrupted"""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        The exit code: 2 for a user's error, printed as one message.
    """
    # It is None where it was closed before the start.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    # What its encoding lacks becomes a question mark.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            # Flushed here: Python's own flush at exit would raise where nobody catches it.
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("mmm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.
        _write_no_more()
        return 0
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        _write_no_more()
        print(f"mmm: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


def _write_no_more() -> None:
    """Send what is still in standard output's buffer nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if not argv:
        print(_usage())
        return 2
    name, *arguments = argv
    if name in VERSION:
        print(f"mmm {__version__}")
        return 0
    if name in HELP:
        print(_usage())
        return 0
    if name not in SUBCOMMANDS:
        hint = did_you_mean(name, [*SUBCOMMANDS, *HELP, *VERSION]) or f" There are {', '.join(SUBCOMMANDS)}"
        print(f"mmm: error: no subcommand {name!r}.{hint}", file=sys.stderr)
        return 2
    try:
        missing = missing_folder()
        if missing:
            raise LaunchError(missing)
        module = MODULES.get(name, f"mmm_lab.cli.{name.replace('-', '_')}")
        return int(importlib.import_module(module).main(arguments) or 0)
    except (UserError, LaunchUserError, VerifyUserError) as error:
        print(f"mmm: error: {printable_lines(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
