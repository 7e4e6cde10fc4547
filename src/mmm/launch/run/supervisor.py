"""Runs a plan: starts the fork server, passes signals on, and ends every process of the run, however it ends.

The first failure in order of cause is printed, once, and its exit code is launch's.
"""

import contextlib
import os
import selectors
import signal
import socket
import time

from mmm.contract import SOCKET_BUFFER, Report
from mmm.launch.channel import failures
from mmm.launch.channel.failures import Failure, say
from mmm.launch.channel.wire import Status
from mmm.launch.plan.host_plan import HostPlan
from mmm.launch.run import processes, stacks
from mmm.launch.run.control import Limits, RunControl
from mmm.launch.run.output import Output
from mmm.launch.run.server import ForkServerProcess

DRAIN = 1.0  # s for the rest of the output
LEFTOVER_GRACE = 0.3  # s for processes that outlive their ranks, between SIGTERM and SIGKILL


class Supervisor(RunControl):
    """This host's ranks. No process of the run is left after `run`."""

    host = ""  # said of failures where it is not clear which host is meant
    ignore_sigterm = False  # a scheduler may signal all of the run's processes, the fork server too
    inherit: tuple[int, ...] = ()  # further file descriptors that the ranks get

    def __init__(
        self,
        plan: HostPlan,
        limits: Limits | None = None,
        server: ForkServerProcess | None = None,
        persistent: bool = False,
    ) -> None:
        """`server`: the fork server of the attempt before. persistent: it is to stay, for another attempt."""
        super().__init__(len(plan.ranks), limits)
        self.plan, self.server, self.persistent = plan, server, persistent
        self.pids: dict[int, int] = {}  # rank → pid, of those started
        self.buffer = b""

    @property
    def at_rest(self) -> bool:
        """Whether all ranks have ended, and their fork server waits for the next."""
        return self.persistent and len(self.ended) == self.total

    def clean_up(self) -> None:
        if self.server is not None and not self.at_rest:
            self.server.close()
            self.server = None

    def start(self) -> None:
        """Start the ranks, and their fork server if there is none yet."""
        if self.server is None:
            self.output = Output(self.selector) if self.limits.timeout is not None else None
            self.server = ForkServerProcess(
                self.plan,
                self.output,
                ignore_sigterm=self.ignore_sigterm,
                ignored=self.ignored,
                passed_fds=self.inherit,
                persistent=self.persistent,
            )
            if self.output is not None:
                self.output.started()
        else:
            self.server.begin(self.plan)
        for source in (self.server.status, self.server.reports.fileno()):
            self.selector.register(source, selectors.EVENT_READ)

    def serve(self) -> bool:
        """Take in what has happened. False once the fork server is gone."""
        assert self.server is not None
        ready = self.wait()
        self.read_reports()  # before statuses: a report is sent before its rank ends
        if self.server.status not in ready:
            return True
        data = os.read(self.server.status, 1 << 16)
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.on_status(Status.loads(line))
        return bool(data) and not self.at_rest

    def read_reports(self) -> None:
        assert self.server is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                report = Report.loads(self.server.reports.recv(SOCKET_BUFFER))
                if report.kind == "saves":
                    self.on_saves()
                elif not any(f.report and f.rank == report.rank for f in self.failures):
                    self.failures.append(Failure.reported(report, self.host))

    def on_saves(self) -> None:
        self.saves = True

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
        if self.termination_reason and self.server is not None:
            self.server.write_termination_reason(self.termination_reason)
        if self.pids:
            self.forward_signal(number)
        return bool(self.pids)

    def forward_signal(self, number: int) -> None:
        if self.server is not None:
            self.server.tell({"signal": int(number)})

    def stacks(self) -> dict[int, stacks.Stack]:
        """Where the ranks are that have not ended."""
        return stacks.ask({rank: pid for rank, pid in self.pids.items() if rank not in self.ended})

    def locate(self) -> None:
        self.located(self.stacks(), dict.fromkeys(self.pids, socket.gethostname()))

    def kill(self) -> None:
        self.kill_at = None
        assert self.server is not None
        if self.persistent and len(self.pids) == self.total:
            processes.send(self.others(), signal.SIGKILL)
        else:  # not reaped yet, so the number is still the fork server's
            self.server.kill()

    def others(self) -> set[int]:
        """All processes of the run but the fork server."""
        assert self.server is not None
        return set(processes.of_run(self.server.pid, self.server.marker)) - {self.server.pid}

    def finish(self) -> int:
        """The ranks have ended, or the fork server is gone: end what is left, and decide on the exit code."""
        self.read_reports()
        assert self.server is not None
        server, gone = self.server, not self.at_rest
        if gone and hasattr(os, "waitid"):  # not on macOS before Python 3.13; its status pipe is closed in any case
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        if self.exit_code is None and self.failures:
            self.fail()
        grace = LEFTOVER_GRACE if self.exit_code is None else 0.0
        processes.end(server.pid, server.marker, grace, spare=None if gone else server.pid)
        code = 0
        if gone:
            server.kill()
            code = server.process.wait()
        if self.output is not None:
            self.output.drain(self.selector, time.monotonic() + DRAIN)
        if self.exit_code is not None:
            return self.exit_code
        if len(self.ended) == len(self.plan.ranks):
            return 0
        self.again = True
        reason, code = failures.end_of_process(code)
        say(f"launch: the process that holds the ranks (pid {server.pid}) {reason}; the ranks were killed")
        return code

    def stop(self) -> None:
        """Ctrl-Z: stop the ranks and launch, until launch is continued. The fork server goes on, to notice its end."""
        ranks = self.others()
        processes.send(ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        processes.send(ranks, signal.SIGCONT)
