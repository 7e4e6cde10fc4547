"""Runs a script on one forked rank, as torchrun would start it, until a recorder has seen its first steps."""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import random
import runpy
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from mmm_verify.errors import ConfigError, describe, is_for_user, own_frame
from mmm_verify.program.recorder import Recorder, Recording
from mmm_verify.ranks.children import flush
from mmm_verify.ranks.ranks import Rank, dumps
from mmm_verify.run import ImportOrder
from mmm_verify.torch_private import averaged_by_fsdp, replaced

OWN_RANKS = (
    "it starts ranks of its own: give a script that torchrun could start, which is one rank and finds RANK and "
    "WORLD_SIZE in its environment; or give the functions of the program, see --help"
)
# Lines, and bytes, of a script's output that are shown if it ends too early.
LINES = 20
MAX_SHOWN = 1 << 14
# Where frames are not of the user's code: this package, Python and what pip has installed, and runpy.
NOT_OF_THE_USER = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parents[1]),
    *sysconfig.get_paths().values(),
    "<frozen",
)
ON_THE_CPU = "and ranks are processes on this host's CPU: choose the device and backend by torch.cuda.is_available()"
# What an error says → what it means here.
EXPLAINED = {
    "EOF when reading a line": "it asks for input, and a rank has no terminal",
    "not compiled with CUDA": f"it uses a GPU, {ON_THE_CPU}",
    "NVIDIA driver": f"it uses a GPU, {ON_THE_CPU}",
    "CUDA GPUs are available": f"it uses a GPU, {ON_THE_CPU}",
    # A build with CUDA, in a process that was forked.
    "re-initialize CUDA": f"it uses a GPU, {ON_THE_CPU}",
    "NCCL": f"it uses NCCL, {ON_THE_CPU}",
    # A build with CUDA, from 2.15 on.
    "nccl": f"it uses NCCL, {ON_THE_CPU}",
}


@dataclass(frozen=True)
class Script:
    """A script, as a user would give it to torchrun.

    Attributes:
        name: path of the file, or name of the module.
        is_module: whether `name` is a module, as after ``-m``.
        args: its arguments.
    """

    name: str
    is_module: bool
    args: tuple[str, ...]

    def check(self, flag: str) -> None:
        """Raise ConfigError, which names the flag, if there is no such file."""
        if self.is_module:
            return
        path = Path(self.name)
        if path.is_dir() or not path.exists():
            raise ConfigError(f"{flag} {self.name}: there is no such file; a module is named by {flag} -m MODULE")

    def run(self) -> None:
        """Run it in this process, as ``python FILE ARGS`` would."""
        sys.argv = [self.name, *self.args]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)))
            runpy.run_path(self.name, run_name="__main__")


def live(
    end: Connection,
    rank: Rank,
    script: Script,
    make_recorder: Callable[[Callable[[Recording], None]], Recorder],
    folder: Path | None,
    output: IO[bytes] | None,
) -> None:
    """The life of a rank: run the script, send what was recorded or how it failed, and wait to be ended.

    A rank that left after its last step would fail the others, which may be in a collective still. So it waits; and
    where the script averages weights after its steps, it runs on, as others may need it before they use theirs.

    Args:
        end: receives the message, as `mmm_verify.ranks.ranks.collect` reads it.
        rank: this rank.
        script: what to run.
        make_recorder: makes the `Recorder` from what receives its recording.
        folder: where the script runs; None for the working directory.
        output: the file for what the script prints; None to print it.
    """
    os.environ.update(rank.environment(listening=False))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if folder is not None:
        os.chdir(folder)
    _connect(output)
    _reseed()

    # The script gets the warnings of a process of its own: pytest may have made errors of some.
    if not sys.warnoptions:
        warnings.resetwarnings()
    imports = ImportOrder()

    def succeed(recording: Recording) -> None:
        _send(end, (True, replace(recording, imported=imports.modules())))
        if not recorder.runs_on:
            _wait()

    recorder = make_recorder(succeed)
    ended = "it ended"
    failure: tuple[str, str] | None = None
    try:
        with recorder.watching(), averaged_by_fsdp(), _watched_processes(end) as started:
            script.run()
            if started:
                ended = OWN_RANKS
    except SystemExit as error:
        ended = f"it exited with code {_exit_code(error)}"
    # The script may raise anything.
    except BaseException as error:
        failure = _failure(error)
    # Nothing has used the weights of its last step.
    recorder.settle()
    if not recorder.is_done:
        if recorder.steps:
            steps = "step" if recorder.steps == 1 else "steps"
            ended += f" after {recorder.steps} optimizer {steps}, and {recorder.wanted} are compared"
        else:
            ended += " without an optimizer step"
        # A failure, which does not let the other ranks wait for this one.
        _send(end, (False, failure or (ended, _last_lines(output))))
    _wait()


def _send(end: Connection, message: Any) -> None:
    """Send a message to the process that has forked this rank."""
    flush()
    end.send_bytes(dumps(message))


def _wait() -> NoReturn:
    """Wait to be ended by the process that has forked this one."""
    while True:
        time.sleep(3600)


def _last_lines(output: IO[bytes] | None) -> str:
    """The end of what the script has printed, if that is in a file."""
    flush()
    if output is None:
        return ""
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - MAX_SHOWN)
    # pread: the position in the file is where the script prints.
    printed = os.pread(output.fileno(), MAX_SHOWN, start)
    lines = printed.decode(errors="replace").splitlines()
    return "\n".join(lines[-LINES:])


def _connect(output: IO[bytes] | None) -> None:
    """Give the script no terminal, and have all that it prints in a file."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdin = os.fdopen(0, closefd=False)
    if output is not None:
        flush()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _reseed() -> None:
    """Seed Python's and NumPy's generators as in a new process: forks would all have those of their parent."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


@contextlib.contextmanager
def _watched_processes(end: Connection) -> Iterator[list[Any]]:
    """Inside, a process that the script starts may not be a rank. Yields those that may be: all but daemons."""
    process = os.getpid()
    init_group = dist.init_process_group
    start = multiprocessing.process.BaseProcess.start
    started: list[Any] = []

    def watched_init(*args: Any, **kwargs: Any) -> None:
        if os.getpid() != process:
            _send(end, (False, (OWN_RANKS, "")))
            _wait()
        init_group(*args, **kwargs)

    def watched_start(self: Any) -> None:
        # torch.multiprocessing.spawn calls the user's function by one of its own.
        if getattr(self._target, "__module__", "") == "torch.multiprocessing.spawn":
            raise ConfigError(OWN_RANKS)
        # A DataLoader's workers are daemons.
        if not self.daemon:
            started.append(self)
        start(self)

    with (
        replaced(dist, "init_process_group", watched_init),
        replaced(multiprocessing.process.BaseProcess, "start", watched_start),
    ):
        yield started


def _exit_code(error: SystemExit) -> int:
    """The exit code of a script that has called ``sys.exit``, as Python gives it."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    # Python prints a message, and does not count it as a success.
    print(error.code, file=sys.stderr)
    return 1


def _failure(error: BaseException) -> tuple[str, str]:
    """Why a script failed: one line, with the line of the user's code; and the traceback, if that says more."""
    if is_for_user(error):
        return str(error), ""
    message = describe(error)
    frame = own_frame(error, NOT_OF_THE_USER)
    where = ""
    if frame is not None:
        where = f" ({os.path.basename(frame.filename)}:{frame.lineno}: {frame.line})"
    for sign, meaning in EXPLAINED.items():
        if sign in str(error):
            return f"{meaning}{where}", ""
    # Without the frames of this package and of runpy, which come first.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(NOT_OF_THE_USER):
        trace = trace.tb_next
    lines = traceback.format_exception(error.with_traceback(trace))
    return f"{message}{where}", "".join(lines)
