"""How a rank says why it ends.

Under `launch` the rank's child runner has attached a socket: a report goes there before the rank exits, and launch
prints the first, once for the whole run. Under another launcher nobody collects: each rank that fails says so on its
own stderr, with its rank and host, because it may be the only one. What all ranks are known to have, rank 0 says.
"""

import contextlib
import io
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from mmm.errors import UserError
from mmm.outside import printable_lines
from mmm.runtime import contract, startup, streams
from mmm.runtime.contract import DRY_RUN_VARIABLE, RANK_VARIABLES, USER_ERROR_EXIT, report
from mmm.runtime.contract import first_failure as first_failure  # docs/launch.md names it here
from mmm.runtime.ranks import command_line, whoami


def rank() -> int:
    """This process's rank by the environment (torch's variables, then MPI's and Slurm's); 0 where none is set."""
    for name in [name for source in RANK_VARIABLES.values() for name in source.rank]:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def log_prefix() -> str:
    """`[rank 3 on nid0042] `, for a line on this process's own stderr; "" for a process that is alone."""
    try:
        if whoami().world_size == 1:
            return ""
    except UserError:  # the variables of a rank, but not all of them, or not such as fit
        pass
    return f"[rank {rank()} on {socket.gethostname()}] "


def report_user_error(error: UserError) -> None:
    """Say `error: <message>`: through launch, or else on stderr, with rank and host. Does not exit.

    Without launch every rank that has an error says it, except where the error is `on_every_rank`: then rank 0 does.
    """
    text = printable_lines(error)
    if report(error.reported_as, text, USER_ERROR_EXIT):
        return
    everywhere = error.on_every_rank
    if rank() == 0 or not everywhere:
        print(f"error: {'' if everywhere else log_prefix()}{text}", file=sys.stderr, flush=True)


def run_main(fn: Callable[[], object]) -> NoReturn:
    """Run a program's main function and exit: 0, or 2 for a `UserError`, which is said once and without a traceback.

    Any other exception propagates, and in a dry run all do: there the dry run says it. What `fn` returns is not used.
    """
    startup.imported()
    streams.never_fail()
    try:
        contract.check_folder()
        fn()
    except UserError as error:
        if DRY_RUN_VARIABLE in os.environ:
            raise
        report_user_error(error)
        sys.exit(USER_ERROR_EXIT)
    sys.exit(0)


@contextlib.contextmanager
def print_once() -> Iterator[None]:
    """For a command line's parsing: what it prints before it exits is printed once for the run, not once a rank.

    stdout and stderr are held back inside. If the block raises `SystemExit`, as `--help` and a wrong flag do, launch
    (or rank 0) prints them, and the exit goes on; otherwise rank 0 prints what there is. Without launch the other ranks
    say in one line what they refuse: a host may have started them with other words than rank 0.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except SystemExit as stop:
        if stop.code is None or stop.code == 0:
            _say(out, err)
            raise
        if not isinstance(stop.code, int):
            err.write(f"{stop.code}\n")
        code = stop.code if isinstance(stop.code, int) else 1
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
