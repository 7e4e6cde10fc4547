"""Runs a plan: starts the fork server, passes signals on, and ends every process of the run, however it ends.

The first failure in order of cause is printed, once, and its exit code is launch's.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
import uuid

from mmm.contract import MARKER_VARIABLE, SOCKET_BUFFER, VERDICT_VARIABLE, Report
from mmm.launch.control import processes, stacks, wire
from mmm.launch.control.failures import Failure, say, signal_name
from mmm.launch.control.output import Output
from mmm.launch.control.run import Limits, RunControl
from mmm.launch.control.wire import Instructions, Status
from mmm.launch.job.local import LaunchPlan

DRAIN = 1.0  # s for the rest of the output
LEFTOVER_GRACE = 0.3  # s for processes that outlive their ranks, between SIGTERM and SIGKILL


class Supervisor(RunControl):
    """This host's ranks. No process of the run is left after `run`."""

    host = ""  # said of failures where it is not clear which host is meant
    shielded = False  # a scheduler may signal all of the run's processes, the fork server too

    def __init__(self, plan: LaunchPlan, limits: Limits | None = None) -> None:
        super().__init__(len(plan.ranks), limits)
        self.plan = plan
        self.pids: dict[int, int] = {}  # rank → pid, of those started
        self.marker = uuid.uuid4().hex
        self.buffer = b""
        self.verdict_fd: int | None = None  # why the ranks are ended, once they are

    def clean_up(self) -> None:
        if self.verdict_fd is not None:
            os.close(self.verdict_fd)
        with contextlib.suppress(AttributeError, ProcessLookupError):
            if self.fork_server.returncode is None:  # only after an error of launch's own
                os.killpg(self.fork_server.pid, signal.SIGKILL)

    def start(self) -> None:
        """Start the fork server, in a session of its own: the terminal's Ctrl-C comes to launch alone."""
        plan = self.plan
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
            *inherited, plan.ranks, plan.fork, command, os.getpid(), self.shielded, ignored=sorted(self.ignored)
        )
        instructions = todo.write()
        own = {MARKER_VARIABLE: self.marker, wire.FORK_SERVER_VARIABLE: str(instructions)}
        if hasattr(os, "memfd_create"):  # by its path: ranks may close every file that they have not opened
            self.verdict_fd = os.memfd_create("verdict")
            own[VERDICT_VARIABLE] = f"/proc/{os.getpid()}/fd/{self.verdict_fd}"
        server = [plan.python, *target.flags, "-m", wire.FORK_SERVER, *(target.tail() if plan.fork else [])]
        self.output = Output(self.selector) if self.limits.timeout is not None else None
        out = (self.output.stdout, self.output.stderr) if self.output is not None else (None, None)
        self.fork_server = subprocess.Popen(
            server,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **plan.shared, **own},
            stdout=out[0],
            stderr=out[1],
            pass_fds=(*inherited, instructions, *self.passed_fds()),
            start_new_session=True,
        )
        os.close(instructions)
        os.close(control_read)
        os.close(status_write)
        failure_write.close()
        if self.output is not None:
            self.output.started()
        for source in (self.status, self.reports.fileno()):
            self.selector.register(source, selectors.EVENT_READ)

    def serve(self) -> bool:
        """Take in what has happened. False once the fork server is gone."""
        ready = self.wait()
        self.read_reports()  # before statuses: a report is sent before its rank ends
        if self.status not in ready:
            return True
        data = os.read(self.status, 1 << 16)
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.on_status(Status.loads(line))
        return bool(data)

    def read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                report = Report.loads(self.reports.recv(SOCKET_BUFFER))
                if not any(f.report and f.rank == report.rank for f in self.failures):
                    self.failures.append(Failure.reported(report, self.host))

    def on_status(self, status: Status) -> None:
        if status.code is None:
            self.pids[status.rank] = status.pid
            if self.output is not None:
                self.output.last = time.monotonic()  # what is before the ranks does not count as idle
            return
        self.ended.add(status.rank)
        if status.code != 0 and not any(f.rank == status.rank for f in self.failures):
            self.failures.append(Failure.ended(status, self.host))

    def send(self, number: int) -> bool:
        if self.verdict and self.verdict_fd is not None:
            os.pwrite(self.verdict_fd, self.verdict.encode("utf-8", "backslashreplace"), 0)
        if self.pids:
            self.forward_signal(number)
        return bool(self.pids)

    def forward_signal(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.control, bytes([number]))  # the fork server reads it when all ranks have been started

    def stacks(self) -> dict[int, stacks.Stack]:
        """Where the ranks are that have not ended."""
        return stacks.ask({rank: pid for rank, pid in self.pids.items() if rank not in self.ended})

    def locate(self) -> None:
        self.located(self.stacks(), dict.fromkeys(self.pids, socket.gethostname()))

    def passed_fds(self) -> tuple[int, ...]:
        """Further file descriptors that the ranks inherit."""
        return ()

    def kill(self) -> None:
        self.kill_at = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.fork_server.pid, signal.SIGKILL)  # not reaped yet, so the number is still the fork server's

    def finish(self) -> int:
        """The fork server is gone: end what it left, and decide on the exit code."""
        self.read_reports()
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13; its end of the status pipe is closed in any case
            os.waitid(os.P_PID, self.fork_server.pid, os.WEXITED | os.WNOWAIT)
        if self.exit_code is None and self.failures:
            self.fail()
        processes.end(self.fork_server.pid, self.marker, grace=LEFTOVER_GRACE if self.exit_code is None else 0.0)
        self.kill()
        code = self.fork_server.wait()
        if self.output is not None:
            self.output.drain(self.selector, time.monotonic() + DRAIN)
        if self.exit_code is not None:
            return self.exit_code
        if len(self.ended) == len(self.plan.ranks):
            return 0
        self.again = True
        reason = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        say(f"launch: the process that holds the ranks (pid {self.fork_server.pid}) {reason}; the ranks were killed")
        return 128 - code if code < 0 else code or 1

    def stop(self) -> None:
        """Ctrl-Z: stop the ranks and launch, until launch is continued. The fork server goes on, to notice its end."""
        ranks = set(processes.of_run(self.fork_server.pid, self.marker)) - {self.fork_server.pid}
        processes.send(ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        processes.send(ranks, signal.SIGCONT)
