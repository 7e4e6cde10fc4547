"""Reports why a rank ends.

Under `launch`, a socket is attached to the rank: a report goes there before the rank exits, and launch prints the first
report, once for the whole run. Under another launcher nobody collects reports. Then each rank that fails prints its
error on its own stderr, with its rank and host, because it may be the only one that fails; an error that all ranks are
known to have is only printed by rank 0.
"""

import contextlib
import io
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from mmm.errors import LaunchError, UserError
from mmm.outside import printable_lines
from mmm.runtime import startup, streams
from mmm.runtime.ranks import DRY_RUN_VARIABLE, command_line, whoami
from mmm_launch.contract import RANK_VARIABLES, USER_ERROR_EXIT, missing_folder, report

# docs/launch.md names it here.
from mmm_launch.contract import first_failure as first_failure


def rank() -> int:
    """Return this process's rank by the environment (torch's variables, then MPI's and Slurm's); 0 if none is set."""
    for variables in RANK_VARIABLES.values():
        for name in variables.rank:
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
    return 0


def log_prefix() -> str:
    """Return `[rank 3 on nid0042] `, for a line on this process's own stderr; "" for a process that runs alone."""
    try:
        if whoami().world_size == 1:
            return ""
    except UserError:
        # The environment has some variables of a rank, but not all, or they contradict each other: it is a rank.
        pass
    return f"[rank {rank()} on {socket.gethostname()}] "


def report_user_error(error: UserError) -> None:
    """Print `error: <message>`: through launch, or else on stderr, with rank and host. Does not exit.

    Without launch every rank that has an error prints it, unless the error is `on_every_rank`: then only rank 0 does.
    """
    text = printable_lines(error)
    if report(error.reported_as, text, USER_ERROR_EXIT):
        return
    everywhere = error.on_every_rank
    if rank() == 0 or not everywhere:
        prefix = "" if everywhere else log_prefix()
        print(f"error: {prefix}{text}", file=sys.stderr, flush=True)


def run_main(fn: Callable[[], object]) -> NoReturn:
    """Run a program's main function and exit: with 0, or with 2 after a `UserError`.

    A `UserError` is printed once, without a traceback. Any other exception propagates. In a dry run all exceptions
    propagate: the dry run prints them. The value that `fn` returns is not used.
    """
    startup.imported()
    streams.never_fail()
    try:
        missing = missing_folder()
        if missing:
            raise LaunchError(missing)
        fn()
    except UserError as error:
        if DRY_RUN_VARIABLE in os.environ:
            raise
        report_user_error(error)
        sys.exit(USER_ERROR_EXIT)
    sys.exit(0)


@contextlib.contextmanager
def print_once() -> Iterator[None]:
    """Make what the ``with`` block prints appear once for the run, not once for each rank; for parsing a command line.

    stdout and stderr are held back inside. If the block raises `SystemExit`, as `--help` and a wrong flag do, launch
    (or rank 0) prints them, and the program exits; otherwise rank 0 prints what there is. Without launch, the other
    ranks print in one line which command line they refuse: their hosts may have started them with another one than
    rank 0's.
    """
    out = io.StringIO()
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            _say(out, err)
            raise
        code = stop.code
        if not isinstance(code, int):
            # Python prints a text that is given as the exit code, and exits with 1.
            err.write(f"{code}\n")
            code = 1
        text = out.getvalue() + err.getvalue()
        if not report("exit", text, code):
            _say(out, err)
            if rank() != 0:
                line = f"error: {log_prefix()}the command line is refused: {shlex.join(command_line())}"
                print(line, file=sys.stderr, flush=True)
        raise SystemExit(code) from None
    _say(out, err)


def _say(out: io.StringIO, err: io.StringIO) -> None:
    if rank() == 0:
        sys.stdout.write(out.getvalue())
        sys.stderr.write(err.getvalue())
        sys.stdout.flush()
