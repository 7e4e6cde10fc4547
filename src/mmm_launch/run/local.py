"""This host's ranks, of launch itself or of an agent: over pipes to their fork server."""

import contextlib
import os
import selectors
import signal
import socket

from mmm_launch.channel import failures
from mmm_launch.channel.failures import Failure
from mmm_launch.channel.wire import Status
from mmm_launch.contract import SOCKET_BUFFER, Report
from mmm_launch.run import processes, stacks
from mmm_launch.run.control import Run, Transport
from mmm_launch.run.output import Output
from mmm_launch.run.server import ForkServerProcess
from mmm_launch.spec.host_spec import HostSpec

LEFTOVER_GRACE = 0.3  # s for processes that outlive their ranks, between SIGTERM and SIGKILL


class LocalRanks(Transport):
    """Starts the fork server, and ends every process of the run, however it ends.

    Attributes:
        plan: what is started.
        server: the fork server, once it has been started.
        host: an agent's: said of failures. Then a scheduler may signal all of the run's processes, the server too.
        inherit: further file descriptors that the ranks get.
        pids: rank → pid, of those started.
        buffer: the beginning of a line of the server's.
        is_gone: the server has ended.
    """

    run: Run

    def __init__(self, plan: HostSpec, host: str = "", inherit: tuple[int, ...] = ()) -> None:
        self.plan = plan
        self.host, self.inherit = host, inherit
        self.server: ForkServerProcess | None = None
        self.pids: dict[int, int] = {}
        self.buffer = b""
        self.is_gone = False

    @property
    def fork_server(self) -> ForkServerProcess:
        """The server, once it has been started."""
        assert self.server is not None
        return self.server

    def start(self, run: Run) -> None:
        """Start the fork server, which starts the ranks."""
        self.run = run
        if run.limits.timeout is not None:
            run.output = Output(run.selector)
        self.server = ForkServerProcess(
            self.plan,
            run.output,
            ignore_sigterm=bool(self.host),
            ignored=run.signals.ignored,
            passed_fds=self.inherit,
        )
        if run.output is not None:
            run.output.started()
        for source in (self.server.status, self.server.reports.fileno()):
            run.selector.register(source, selectors.EVENT_READ)
        run.ranks_started()

    def take_in(self, ready: set[int]) -> None:
        self.read_reports()  # before statuses: a report is sent before its rank ends
        if self.fork_server.status not in ready:
            return
        data = os.read(self.fork_server.status, 1 << 16)
        self.is_gone = not data
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            self.on_status(Status.loads(line))

    def advance(self) -> bool:
        return self.is_gone

    def read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                report = Report.loads(self.fork_server.reports.recv(SOCKET_BUFFER))
                if report.kind == "saves":
                    self.run.will_save()
                elif not any(f.report and f.rank == report.rank for f in self.run.failures):
                    self.run.failed(Failure.reported(report, self.host))

    def on_status(self, status: Status) -> None:
        if status.code is None:
            self.pids[status.rank] = status.pid
            self.run.ranks_started()  # what is before the ranks does not count as idle
            return
        if status.code != 0 and not any(f.rank == status.rank for f in self.run.failures):
            self.run.failed(Failure.ended(status, self.host))
        self.run.rank_ended(status.rank)

    def end(self, number: int, reason: str, grace: float | None) -> bool:
        if reason:
            self.fork_server.write_termination_reason(reason)
        if self.pids:
            self.forward(number)
        return bool(self.pids)

    def forward(self, number: int) -> None:
        self.fork_server.tell({"signal": int(number)})

    def stacks(self) -> dict[int, stacks.Stack]:
        """Where the ranks are that have not ended."""
        return stacks.ask({rank: pid for rank, pid in self.pids.items() if rank not in self.run.ended})

    def locate(self) -> None:
        self.run.located(self.stacks(), dict.fromkeys(self.pids, socket.gethostname()))

    def kill(self) -> None:
        self.fork_server.kill()  # not reaped yet, so the number is still its own

    def others(self) -> set[int]:
        """All processes of the run but the fork server."""
        return set(processes.of_run(self.fork_server.pid, self.fork_server.marker)) - {self.fork_server.pid}

    def finish(self) -> tuple[str, int]:
        self.read_reports()
        server = self.fork_server
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13; its status pipe is closed in any case
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        goes_well = self.run.exit_code is None and not self.run.failures
        processes.end(server.pid, server.marker, LEFTOVER_GRACE if goes_well else 0.0)
        server.kill()
        server.process.wait()
        if self.run.output is not None:
            self.run.output.drain()
        reason, code = failures.end_of_process(server.process.returncode or 0)
        return f"the process that holds the ranks (pid {server.pid}) {reason}; the ranks were killed", code

    def clean_up(self) -> None:
        if self.server is not None:
            self.server.close()

    def stop(self) -> None:
        """Ctrl-Z: stop the ranks and launch, until launch is continued. The fork server goes on, to notice its end."""
        ranks = self.others()
        processes.send(ranks, signal.SIGSTOP)
        super().stop()
        processes.send(ranks, signal.SIGCONT)
