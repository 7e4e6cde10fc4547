"""Starts and ends the fork server of this host's ranks. This runs in its parent: launch, or a host's agent."""

import contextlib
import os
import signal
import socket
import subprocess
import uuid

from mmm_launch.channel.instructions import CHILD, FORK_SERVER, FORK_SERVER_VARIABLE, Instructions
from mmm_launch.channel.link import Link, Lost, Message
from mmm_launch.contract import MARKER_VARIABLE
from mmm_launch.run import processes
from mmm_launch.run.output import Output
from mmm_launch.spec.host_spec import HostSpec

# Seconds between SIGTERM and SIGKILL for processes that outlive their ranks.
LEFTOVER_GRACE = 0.3


class ForkServer:
    """Starts the fork server, and ends every process of its ranks, however the fork server ends.

    Attributes:
        link: connection to the fork server.
        marker: value of MARKER_VARIABLE in all processes of these ranks, and in no others.
        process: the process of the fork server.
        exit_code: the fork server's exit code, once it has ended.
    """

    def __init__(self, spec: HostSpec, ignored: set[int], output: Output | None = None) -> None:
        """Start the fork server, in a session of its own: the terminal's Ctrl-C comes only to launch.

        Args:
            spec: what the fork server and its ranks get.
            ignored: signals that launch was started to ignore.
            output: pipes for what ranks print. None: they print to launch's own stdout and stderr.
        """
        self.marker = uuid.uuid4().hex
        self.exit_code: int | None = None
        own_end, its_end = socket.socketpair()
        self.link = Link(own_end)
        target = spec.target
        command = target.line()
        server_command = [spec.python, *target.flags, "-m", FORK_SERVER]
        if target.is_python:
            command = [spec.python, *target.flags, "-m", CHILD, *target.tail()]
        if spec.fork:
            # From these the fork server finds out what to import before it forks.
            server_command += target.tail()
        instructions = Instructions(
            control=its_end.fileno(),
            parent=os.getpid(),
            ranks=spec.ranks,
            command=command,
            ignored=sorted(ignored),
        ).write()
        variables = {MARKER_VARIABLE: self.marker, FORK_SERVER_VARIABLE: str(instructions)}
        # None: the fork server and its ranks print to launch's own stdout and stderr.
        stdout: int | None = None
        stderr: int | None = None
        if output is not None:
            stdout = output.stdout
            stderr = output.stderr
        self.process = subprocess.Popen(
            server_command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **spec.shared, **variables},
            pass_fds=(its_end.fileno(), instructions),
            start_new_session=True,
        )
        os.close(instructions)
        its_end.close()

    def send(self, message: Message) -> None:
        # Whoever reads from this connection will see that it is lost.
        with contextlib.suppress(Lost):
            self.link.send(message)

    def kill(self) -> None:
        """Kill the fork server, and every rank that has stayed in its process group."""
        # The fork server is not reaped yet, so no other process can have its pid.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self, grace: float) -> int:
        """Wait for the fork server, whose connection has ended, and end the processes that its ranks have left.

        Args:
            grace: seconds that those processes have between SIGTERM and SIGKILL.

        Returns:
            The fork server's exit code.
        """
        if self.exit_code is None:
            # WNOWAIT leaves it unreaped: as long as its pid is taken, the session of that number is its own.
            # macOS has no waitid before Python 3.13. There the closed connection has to be enough.
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            processes.end(self.process.pid, self.marker, grace)
            self.kill()
            self.exit_code = self.process.wait()
        return self.exit_code

    def close(self) -> None:
        """End the fork server and its ranks, if any of them lives: only after an error."""
        if self.exit_code is None:
            processes.end(self.process.pid, self.marker, grace=0.0)
            self.exit_code = self.process.wait()
        self.link.close()
