"""The fork server of this host's ranks, as the process sees it that has started it: launch, or an agent."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import uuid
from typing import Any

from mmm_launch.channel import wire
from mmm_launch.channel.wire import Instructions
from mmm_launch.contract import MARKER_VARIABLE, SOCKET_BUFFER, TERMINAL_VARIABLE, VERDICT_VARIABLE
from mmm_launch.run import processes
from mmm_launch.run.output import Output
from mmm_launch.spec.host_spec import HostSpec


class ForkServerProcess:
    """One for the ranks of `plan`.

    Attributes:
        status, reports: to read. marker: in the environment of every process of the run.
    """

    def __init__(
        self,
        plan: HostSpec,
        output: Output | None,
        *,
        ignore_sigterm: bool,
        ignored: set[int],
        passed_fds: tuple[int, ...],
    ) -> None:
        """Start it, in a session of its own: the terminal's Ctrl-C comes to launch alone."""
        self.marker = uuid.uuid4().hex
        control_read, self.control = os.pipe()
        self.status, status_write = os.pipe()
        self.reports, failure_write = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self.reports, failure_write):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self.reports.setblocking(False)
        target = plan.target
        command = target.line()
        if target.is_python:
            command = [plan.python, *target.flags, "-m", wire.CHILD, *target.tail()]
        inherited = (control_read, status_write, failure_write.fileno())
        todo = Instructions(
            *inherited,
            plan.ranks,
            plan.fork,
            command,
            os.getpid(),
            ignore_sigterm,
            ignored=sorted(ignored),
        )
        instructions = todo.write()
        own = {MARKER_VARIABLE: self.marker, wire.FORK_SERVER_VARIABLE: str(instructions)}
        self.reason_fd: int | None = None  # why the ranks are ended, once they are
        if hasattr(os, "memfd_create"):  # by its path: ranks may close every file that they have not opened
            self.reason_fd = os.memfd_create("reason")
            own[VERDICT_VARIABLE] = f"/proc/{os.getpid()}/fd/{self.reason_fd}"
        if output is not None and os.isatty(1):  # launch copies what ranks write there
            size = os.get_terminal_size(1)
            own[TERMINAL_VARIABLE] = f"{size.columns}x{size.lines}"
        server = [plan.python, *target.flags, "-m", wire.FORK_SERVER, *(target.tail() if plan.fork else [])]
        self.process = subprocess.Popen(
            server,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **plan.shared, **own},
            stdout=output.stdout if output is not None else None,
            stderr=output.stderr if output is not None else None,
            pass_fds=(*inherited, instructions, *passed_fds),
            start_new_session=True,
        )
        os.close(instructions)
        os.close(control_read)
        os.close(status_write)
        failure_write.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, message: dict[str, Any]) -> None:
        """It reads this once all ranks have been started."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.control, json.dumps(message).encode() + b"\n")

    def write_termination_reason(self, text: str) -> None:
        if self.reason_fd is not None:
            os.pwrite(self.reason_fd, text.encode("utf-8", "backslashreplace"), 0)

    def kill(self) -> None:
        """It, and every rank that has stayed in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, if it lives, and what is left of the run. No rank lives by now, unless launch has failed."""
        if self.process.returncode is None:
            processes.end(self.pid, self.marker, grace=0.0)
            self.process.wait()
        for fd in (self.control, self.status, self.reason_fd):
            if fd is not None:
                os.close(fd)
        self.reports.close()
