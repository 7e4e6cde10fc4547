"""Runs a plan: starts the agent, passes signals on, and ends every process of the run, however it ends.

The first failure in order of cause is printed, once, and its exit code is launch's.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

from mmm.launch import processes, wire
from mmm.launch.local import LaunchPlan
from mmm.launch.wire import Instructions, Report, Status

GRACE = 1.0              # s that ranks have between the signal that ends them and SIGKILL
SETTLE = 0.06            # s to wait, after a first failure, for one that came before it
SETTLE_DOUBTFUL = 0.5    # s, if all that is known so far looks like a consequence
LEFTOVER_GRACE = 0.3     # s for processes that outlive their ranks, between SIGTERM and SIGKILL
REPEAT = 0.3             # s within which a second SIGINT is the same Ctrl-C

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What a rank's traceback says when it failed because another had gone.
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe",
                "remote process exited", "DistNetworkError", "DistStoreError", "failed to recv", "Timed out waiting",
                "NCCL communicator was aborted")


@dataclass(frozen=True)
class Failure:
    """A rank that ended badly: by its own report, or by how the system says it ended."""

    rank: int
    exit_code: int
    time: float                             # time.monotonic() when it was noticed where it happened
    doubt: int                              # 0: a cause; 1: SIGABRT, which may be a consequence; 2: a lost connection
    report: Report | None = None
    text: str = ""                          # where there is no report

    @classmethod
    def reported(cls, report: Report) -> "Failure":
        last = report.text.strip().rpartition("\n")[2]
        lost = report.kind == "traceback" and any(sign in report.text[-2000:] or sign in last for sign in CONSEQUENCES)
        return cls(report.rank, report.exit_code, report.time, 2 if lost else 0, report)

    @classmethod
    def ended(cls, status: Status) -> "Failure":
        code = status.code or 0
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            text = f"rank {status.rank} (pid {status.pid}) was killed by {name} on {socket.gethostname()}"
            return cls(status.rank, 128 - code, status.time, int(-code == signal.SIGABRT), text=text)
        return cls(status.rank, code, status.time, 0, text=f"rank {status.rank} exited with code {code}")


def supervise(plan: LaunchPlan) -> int:
    """Start the plan's ranks, wait for them, and return the exit code. No process of the run is left afterwards."""
    return Supervisor(plan).run()


class Supervisor:
    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self.pids: dict[int, int] = {}                       # rank → pid, of those started
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.exit_code: int | None = None                    # once it is decided
        self.settled_at: float | None = None                 # when the failures known by then are judged
        self.kill_at: float | None = None
        self.interrupted_at = -REPEAT
        self.marker = uuid.uuid4().hex
        self.buffer = b""

    def run(self) -> int:
        previous = self.take_signals()
        try:
            self.start()
            while self.serve():
                self.decide(time.monotonic())
            return self.finish()
        finally:
            with contextlib.suppress(AttributeError, ProcessLookupError):
                if self.agent.returncode is None:            # only after an error in this file
                    os.killpg(self.agent.pid, signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def start(self) -> None:
        """Start the agent, in a session of its own: the terminal's Ctrl-C comes to launch alone."""
        plan = self.plan
        control_read, self.control = os.pipe()
        self.status, status_write = os.pipe()
        self.reports, failure_write = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self.reports, failure_write):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, option, wire.SOCKET_BUFFER)
        self.reports.setblocking(False)
        target = plan.target
        command = target.line()
        if target.is_python and not plan.fork:
            command = [sys.executable, *target.flags, "-m", "mmm.runtime.child", *target.tail()]
        inherited = (control_read, status_write, failure_write.fileno())
        todo = Instructions(*inherited, plan.ranks, plan.fork, command, os.getpid())
        own = {wire.MARKER_VARIABLE: self.marker, wire.AGENT_VARIABLE: todo.dumps()}
        agent = [sys.executable, *target.flags, "-m", "mmm.runtime.prefork", *(target.tail() if plan.fork else [])]
        self.agent = subprocess.Popen(agent, stdin=subprocess.DEVNULL, env={**os.environ, **plan.shared, **own},
                                      pass_fds=inherited, start_new_session=True)
        os.close(control_read)
        os.close(status_write)
        failure_write.close()
        self.selector = selectors.DefaultSelector()
        for source in (self.status, self.reports.fileno(), self.wake):
            self.selector.register(source, selectors.EVENT_READ)

    def serve(self) -> bool:
        """Take in what has happened. False once the agent is gone."""
        deadlines = [t for t in (self.settled_at, self.kill_at) if t is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = {key.fd for key, _ in self.selector.select(timeout)}
        if self.wake in ready:
            for number in os.read(self.wake, 4096):
                self.on_signal(number)
        self.read_reports()                      # before statuses: a report is sent before its rank ends
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
                report = Report.loads(self.reports.recv(wire.SOCKET_BUFFER))
                if not any(f.report and f.rank == report.rank for f in self.failures):
                    self.failures.append(Failure.reported(report))

    def on_status(self, status: Status) -> None:
        if status.code is None:
            self.pids[status.rank] = status.pid
            return
        self.ended.add(status.rank)
        if status.code != 0 and not any(f.rank == status.rank for f in self.failures):
            self.failures.append(Failure.ended(status))

    def decide(self, now: float) -> None:
        """Judge the failures once they have settled; kill those who were given their grace."""
        if self.exit_code is None and self.failures:
            doubtful = all(f.doubt for f in self.failures)
            if self.settled_at is None:
                self.first_at = now
            self.settled_at = self.first_at + (SETTLE_DOUBTFUL if doubtful else SETTLE)
            if now >= self.settled_at or len(self.ended) == len(self.plan.ranks):
                self.fail()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()

    def fail(self) -> None:
        """Print the failure that caused the others, and end the rest."""
        first = min(self.failures, key=lambda f: (f.doubt, f.time))
        self.exit_code, self.settled_at = first.exit_code, None
        report = first.report
        if report is None:
            say(f"launch: {first.text}")
        elif report.kind == "traceback":
            others = len({f.rank for f in self.failures} - {first.rank})
            after = f"; {others} other{'s' if others > 1 else ''} failed after it" if others else ""
            say(f"launch: rank {first.rank} failed on {socket.gethostname()}{after}:\n{report.text.rstrip()}")
        else:
            say(f"error: {report.text}" if report.kind == "user" else report.text.rstrip("\n"))
        self.end(signal.SIGTERM)

    def end(self, number: int) -> None:
        """Send the ranks signal `number`, and SIGKILL after the grace."""
        self.kill_at = time.monotonic() + GRACE
        if not self.pids:                        # none has started: there is nothing that could end in order
            self.kill()
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self.control, bytes([number]))

    def kill(self) -> None:
        self.kill_at = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.agent.pid, signal.SIGKILL)        # not reaped yet, so the number is still the agent's

    def finish(self) -> int:
        """The agent is gone: end what it left, and settle the exit code."""
        self.read_reports()
        os.waitid(os.P_PID, self.agent.pid, os.WEXITED | os.WNOWAIT)
        if self.exit_code is None and self.failures:
            self.fail()
        processes.end(self.agent.pid, self.marker, grace=LEFTOVER_GRACE if self.exit_code is None else 0.0)
        self.kill()
        code = self.agent.wait()
        if self.exit_code is not None:
            return self.exit_code
        if len(self.ended) == len(self.plan.ranks):
            return 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        say(f"launch: the process that holds the ranks (pid {self.agent.pid}) {how}; the ranks were killed")
        return 128 - code if code < 0 else code or 1

    def take_signals(self) -> dict[int, Any]:
        """Have signals wake `serve`. A SIGHUP that is ignored (nohup) stays ignored."""
        self.wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        previous: dict[int, Any] = {}
        for number in (*ENDING, signal.SIGTSTP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, lambda *_: None)
        return previous

    def on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self.stop()
        if number not in ENDING:
            return
        now = time.monotonic()
        if number == signal.SIGINT:
            again = self.interrupted_at > 0 and now - self.interrupted_at > REPEAT
            self.interrupted_at = max(self.interrupted_at, now) if self.interrupted_at < 0 else self.interrupted_at
            if again:
                self.kill()
                return
        if self.exit_code is None:
            self.exit_code = 128 + number
            self.settled_at = None
            left = len(self.plan.ranks) - len(self.ended)
            say(f"launch: {signal.Signals(number).name}: ending {left} rank{'' if left == 1 else 's'}")
            self.end(number)


    def stop(self) -> None:
        """Ctrl-Z: stop the ranks and launch, until launch is continued."""
        os.killpg(self.agent.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(self.agent.pid, signal.SIGCONT)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
