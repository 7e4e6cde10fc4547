"""How a rank says why it ends, so that it is said once for the whole run.

Under `launch` the rank's child runner has attached a socket: a report goes there before the rank exits, and launch
prints the first. Under another launcher, or alone, rank 0 prints on stderr.
"""

import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from mmm.errors import UserError
from mmm.launch.wire import SOCKET_BUFFER, Report

USER_ERROR_EXIT = 2
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
SEND_TIMEOUT = 1.0                               # s; launch reads all the time, so this is for a launch that hangs

_channel: socket.socket | None = None
_owner = 0                                       # the process whose failure is the rank's: not one that it forks


def attach(fd: int) -> None:
    """Send this process's reports to the socket `fd`. The child runner calls this, before the target runs."""
    global _channel, _owner
    _channel = socket.socket(fileno=fd)
    _channel.set_inheritable(False)
    _channel.settimeout(SEND_TIMEOUT)
    with contextlib.suppress(OSError):
        _channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    _owner = os.getpid()


def attached() -> bool:
    """True where launch listens to this process: it is a rank of launch, and no process that a rank started."""
    return _channel is not None and os.getpid() == _owner


def rank() -> int:
    """This process's rank by the environment (torch's variables, then MPI's and Slurm's); 0 where none is set."""
    for name in RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def report(kind: str, text: str, exit_code: int, caught: float | None = None) -> bool:
    """Send launch a report (kinds: `mmm.launch.wire.Report`). False if nobody listens: then the caller has to print."""
    if _channel is None or not attached():
        return False
    message = Report(rank(), kind, text, exit_code, time.monotonic() if caught is None else caught)
    try:
        _channel.send(message.dumps())
    except OSError:
        return False
    return True


def report_user_error(error: BaseException) -> None:
    """Say `error: <message>` once for the run: through launch, or else on rank 0's stderr. Does not exit.

    Without launch a message that only another rank has is not printed: checks that can fail belong before the process
    group, where every rank makes them.
    """
    if not report("user", str(error), USER_ERROR_EXIT) and rank() == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)


def run_main(fn: Callable[[], object]) -> NoReturn:
    """Run a program's main function and exit: 0, or 2 for a `UserError`, which is said once and without a traceback.

    Any other exception propagates. What `fn` returns is not used.
    """
    try:
        fn()
    except UserError as error:
        report_user_error(error)
        sys.exit(USER_ERROR_EXIT)
    sys.exit(0)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """For a command line's parsing: what it prints before it exits is printed once for the run, not once a rank.

    stdout and stderr are held back inside. If the block raises `SystemExit`, as `--help` and a wrong flag do, launch
    (or rank 0) prints them, and the exit goes on; otherwise rank 0 prints what there is.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code and report("exit", out.getvalue() + err.getvalue(), code):
            raise SystemExit(code) from None
        _say(out, err)
        raise
    _say(out, err)


def _say(out: io.StringIO, err: io.StringIO) -> None:
    if rank() == 0:
        sys.stdout.write(out.getvalue())
        sys.stderr.write(err.getvalue())
        sys.stdout.flush()
