"""The life of one run, wherever its ranks are and whatever has started them. This is the process of `launch`.

`Run` learns what becomes of the ranks, decides what follows, and sends messages to the processes that hold the ranks.
A `Transport` carries them: `LocalRanks` to the fork server of this host, `Backend` to the agents of many hosts. The
messages are the same in both cases (`mmm_launch.channel.link`).

What happens from SIGTERM to the exit code: `Signals` wakes `Run.wait`. `interrupted` decides that the exit code is 143.
`end` has the ranks signalled and sets the clock of `kill`. When the transport's `is_over` says that nothing is left,
`ranks_are_gone` ends the run. A rank's failure arrives in `on_message` instead, and `decide` does what `interrupted`
does. Before `Signals` are taken, and between two attempts (`mmm_launch.run.attempts`), SIGTERM ends launch at once.

How long launch waits:

    from SIGTERM to SIGKILL     --grace; without it `SAVING` if ranks have said that they save, else `GRACE`
    after a rank has failed     see `failures`: until it is known which rank failed first
    for agents, mpiexec, srun   see `mmm_launch.run.backend`
"""

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod

from mmm_launch.channel import failures
from mmm_launch.channel.failures import Failure, say, signal_name
from mmm_launch.channel.instructions import PASSED_ON
from mmm_launch.channel.link import Message
from mmm_launch.contract import ENDING, Report
from mmm_launch.run.output import Output
from mmm_launch.run.waking import Clocks, Signals

# Seconds that ranks have between the signal that ends them and SIGKILL.
GRACE = 1.0
# The same, in seconds, for ranks that save when somebody ends the run, without --grace.
SAVING = 60.0


class Transport(ABC):
    """Starts the processes that hold the ranks, tells the run what becomes of them, and ends them when it says so.

    Attributes:
        silent_hosts: names of hosts that kept the run from starting, because nothing was heard from them.
    """

    silent_hosts: tuple[str, ...] = ()

    @abstractmethod
    def start(self, run: "Run") -> None:
        """Start the fork server of the ranks, or mpiexec or srun."""

    @abstractmethod
    def take_in(self, ready: set[int]) -> None:
        """Read from the file descriptors in `ready` that are its own, and tell the run what has happened."""

    @abstractmethod
    def is_over(self) -> bool:
        """Say whether nothing is left of the run."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send every fork server a message. One without ranks yet gets it once its ranks have started."""

    @abstractmethod
    def end(self, message: Message) -> None:
        """Send every fork server the message that ends its ranks. One without ranks yet is ended itself."""

    @abstractmethod
    def kill(self) -> None:
        """End every rank by SIGKILL."""

    @abstractmethod
    def finish(self) -> tuple[str, int]:
        """End the processes that have held the ranks: no rank is left.

        Returns:
            How these processes have ended, in words, and the run's exit code if some ranks had not ended before.
        """

    @abstractmethod
    def clean_up(self) -> None:
        """Leave no process behind, whatever has happened. It is called even after an error in launch itself."""


class Run:
    """One run of the ranks.

    Attributes:
        transport: carries messages to and from the ranks.
        total: number of ranks.
        timeout: seconds without output after which the run counts as hanging. None: it never does.
        has_ranks: whether ranks have been started. From then on silence counts.
        exit_code: launch's exit code, once it is decided.
        reason: why the run ends, in a line, once that is decided; "": nothing has failed.
        is_over: whether nothing is left of the run.
        ended: numbers of the ranks that have ended.
        failures: every failure of a rank that is known.
        cause: the failure that caused the others, once that is decided.
        own_failures: the failures known by then. Later ones happen because launch ends the ranks.
        first_at: when the first failure was looked at, by `time.monotonic()`.
        again: whether a new start may help: not after a signal or a user's mistake.
        saves: whether ranks have said that they save their state when somebody ends the run.
        grace: seconds that --grace gives ranks to save. None: it was not given.
        patience: seconds between the signal that ends the ranks and SIGKILL.
        signalled: whether launch has passed a signal on, for the program to handle.
        output: copies what ranks print, if launch has to see it.
        clocks: actions that are due at a time.
        signals: signals that come to launch.
        selector: file descriptors that the run waits for.
    """

    def __init__(
        self, transport: Transport, total: int, timeout: float | None = None, grace: float | None = None
    ) -> None:
        self.transport = transport
        self.total = total
        self.timeout = timeout
        self.grace = grace
        self.patience = GRACE
        self.has_ranks = False
        self.is_over = False
        self.exit_code: int | None = None
        self.reason = ""
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.own_failures: list[Failure] = []
        self.cause: Failure | None = None
        self.first_at: float | None = None
        self.again = False
        self.saves = False
        self.signalled = False
        self.output: Output | None = None
        self.clocks = Clocks()
        self.signals = Signals()
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run the ranks and return the exit code. No process of the run is left then."""
        self.signals.take(self.selector)
        try:
            self.transport.start(self)
            while not self.is_over:
                ready = self.wait()
                self.transport.take_in(ready)
                # Signals come after the messages: what a rank has said before the signal counts first.
                for signum in self.signals.read(ready):
                    self.on_signal(signum)
                self.decide()
                # `take_in` may have copied output, which puts the deadline of --timeout off.
                self.set_clocks()
                self.clocks.act()
                if self.transport.is_over():
                    self.ranks_are_gone()
            return self.exit_code or 0
        finally:
            self.transport.clean_up()
            if self.output is not None:
                self.output.close()
            self.signals.give_back()
            self.selector.close()

    def wait(self) -> set[int]:
        """Wait until a file descriptor has something to read, or a clock is due. Returns the descriptors."""
        self.set_clocks()
        ready = {key.fd for key, _ in self.selector.select(self.clocks.timeout())}
        if self.output is not None:
            self.output.copy(ready)
        return ready

    # What is heard.

    def on_message(self, message: Message, host: str) -> None:
        """Act on a message of a fork server.

        Args:
            host: name of its host; "": this host.
        """
        now = time.monotonic()
        if "started" in message:
            self.ranks_started()
        elif "report" in message:
            report = Report(**message["report"])
            if report.kind == "saves":
                self.saves = True
            # The first report of a rank counts: a process may raise again while it ends.
            elif not any(failure.report and failure.rank == report.rank for failure in self.failures):
                self.failed(Failure.reported(report, now - message["ago"], host))
        elif "ended" in message:
            rank = message["ended"]
            code = message["code"]
            # A rank that has reported why it ends has said more than its exit code does.
            if code != 0 and not any(failure.rank == rank for failure in self.failures):
                self.failed(Failure.ended(rank, message["pid"], code, now, host))
            self.ended.add(rank)

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def ranks_started(self) -> None:
        self.has_ranks = True
        if self.output is not None:
            self.output.last = time.monotonic()

    # Decisions.

    def decide(self) -> None:
        """Find the failure that caused the others, once the messages of others had time to arrive. End the ranks."""
        if self.exit_code is not None or not self.failures:
            return
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        due = self.first_at + failures.patience(self.failures)
        if now < due and len(self.ended) < self.total:
            self.clocks.set(self.decide, due)
            return
        cause = self.name_cause()
        # Ranks can read why they are ended. Where somebody has ended the run, no rank has failed.
        reason = self.reason
        if cause.final:
            reason = ""
        self.end(signal.SIGTERM, reason)

    def name_cause(self) -> Failure:
        """Print the failure that caused the others. Its exit code becomes the run's."""
        self.own_failures = list(self.failures)
        self.cause = failures.cause(self.failures)
        again = self.cause.again and not self.signalled
        self.ends(self.cause.exit_code, failures.in_a_line(self.cause), again)
        failures.tell(self.cause, self.failures)
        if self.cause.final:
            self.patience = self.time_to_save()
        return self.cause

    def ends(self, exit_code: int, reason: str, again: bool) -> None:
        """Decide how the run ends."""
        self.exit_code = exit_code
        self.reason = reason
        self.again = again
        self.clocks.clear(self.decide)

    def give_up(self, text: str, exit_code: int, then: str = "") -> None:
        """End the ranks of a run that cannot continue. Print why, and what is done then."""
        self.ends(exit_code, text, again=True)
        say(f"launch: {text}{then}")
        self.end(signal.SIGTERM, text)

    def end(self, signum: int, reason: str = "") -> None:
        """Send the ranks signal `signum`, and SIGKILL after `patience` seconds.

        Args:
            reason: why, for the ranks to read when the signal arrives.
        """
        self.clocks.set(self.kill, time.monotonic() + self.patience)
        self.transport.end({"end": signum, "reason": reason})

    def kill(self) -> None:
        self.clocks.clear(self.kill)
        self.transport.kill()

    def ranks_are_gone(self) -> None:
        """End the run, of which nothing is left. Decide its exit code, if it was not decided before."""
        self.clocks.clear(self.kill)
        text, code = self.transport.finish()
        if self.exit_code is None and self.failures:
            self.name_cause()
        elif self.exit_code is None and len(self.ended) < self.total:
            self.ends(code, text, again=True)
            say(f"launch: {text}")
        self.is_over = True

    # Clocks.

    def set_clocks(self) -> None:
        """Set the clock of --timeout: whatever a rank prints puts it off."""
        hangs_at = None
        if self.exit_code is None and self.timeout is not None and self.output is not None and self.has_ranks:
            hangs_at = self.output.last + self.timeout
        self.clocks.set(self.hangs, hangs_at)

    def hangs(self) -> None:
        """End a run whose ranks have printed nothing for too long."""
        silence = f"no output from any rank for {self.timeout:g} s (--timeout)"
        self.give_up(silence, failures.WATCHDOG_EXIT, f": ending {self.left()}")

    def left(self) -> str:
        left = self.total - len(self.ended)
        if left == 1:
            return "1 rank"
        return f"{left} ranks"

    # Signals.

    def on_signal(self, signum: int) -> None:
        # Ctrl-Z: the ranks stop, then launch. It returns from os.kill when the shell continues it.
        if signum == signal.SIGTSTP:
            self.transport.send({"signal": signal.SIGSTOP})
            os.kill(os.getpid(), signal.SIGSTOP)
            self.transport.send({"signal": signal.SIGCONT})
        elif signum in PASSED_ON:
            self.signalled = True
            self.transport.send({"signal": signum})
        elif signum == signal.SIGINT and self.signals.is_second_interrupt():
            self.kill()
        elif signum in ENDING:
            self.interrupted(signum)

    def interrupted(self, signum: int) -> None:
        """End the ranks, because a signal has told launch to end."""
        # The run is ending already, but no other attempt follows now.
        if self.exit_code is not None:
            self.again = False
            return
        self.ends(128 + signum, signal_name(signum), again=False)
        saving = ""
        if self.saves and signum != signal.SIGHUP:
            saving = ", once they have saved"
            if signum == signal.SIGINT:
                saving += " (Ctrl-C again: at once)"
        say(f"launch: {signal_name(signum)}: ending {self.left()}{saving}")
        if signum != signal.SIGHUP:
            self.patience = self.time_to_save()
        self.end(signum)

    def time_to_save(self) -> float:
        """Return the seconds that ranks have to save and end when somebody ends the run."""
        if self.grace is not None:
            return self.grace
        if self.saves:
            return SAVING
        return GRACE
