"""The fork server of this host's ranks, as the process has it that has started it: launch, or an agent."""

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
    """Starts the fork server, and ends every process of its ranks, however it ends.

    Attributes:
        link: connection to it.
        marker: value of a variable that all processes of these ranks have, and no others.
        exit_code: the fork server's own, once it has ended.
    """

    def __init__(self, spec: HostSpec, ignored: set[int], output: Output | None = None) -> None:
        """Start it, in a session of its own: the terminal's Ctrl-C comes to launch alone.

        Args:
            ignored: signals that launch was started to ignore.
            output: where launch reads what ranks print; None: they have launch's own stdout and stderr.
        """
        self.marker = uuid.uuid4().hex
        self.exit_code: int | None = None
        own_end, its_end = socket.socketpair()
        self.link = Link(own_end)
        target = spec.target
        command = target.line()
        words = [spec.python, *target.flags, "-m", FORK_SERVER]
        if target.is_python:
            command = [spec.python, *target.flags, "-m", CHILD, *target.tail()]
        if spec.fork:
            words += target.tail()
        instructions = Instructions(its_end.fileno(), os.getpid(), spec.ranks, command, sorted(ignored)).write()
        variables = {MARKER_VARIABLE: self.marker, FORK_SERVER_VARIABLE: str(instructions)}
        # None: the fork server and its ranks print to launch's own stdout and stderr.
        stdout = stderr = None
        if output is not None:
            stdout = output.stdout
            stderr = output.stderr
        self.process = subprocess.Popen(
            words,
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
        """It, and every rank that has stayed in its session. It is not reaped yet, so the number is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def finish(self, grace: float) -> int:
        """The connection to it has ended: wait for it, and end what its ranks have left. Returns its exit code.

        Args:
            grace: seconds that these have between SIGTERM and SIGKILL.
        """
        if self.exit_code is None:
            # macOS has no waitid before Python 3.13. There the closed connection has to be enough.
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            processes.end(self.process.pid, self.marker, grace)
            self.kill()
            self.exit_code = self.process.wait()
        return self.exit_code

    def close(self) -> None:
        """End it, if it lives, and what is left of its ranks. None lives by now, unless something has failed."""
        if self.exit_code is None:
            processes.end(self.process.pid, self.marker, grace=0.0)
            self.exit_code = self.process.wait()
        self.link.close()
