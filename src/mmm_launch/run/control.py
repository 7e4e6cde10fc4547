"""The life of one run, wherever its ranks are and whatever has started them.

`Run` hears of the ranks, decides, and has messages sent to what holds them, by a `Transport`: `LocalRanks` is the fork
server of this host, `Backend` the agents of many hosts. The messages are the same (`mmm_launch.channel.link`).

From SIGTERM to the exit code: `Signals` wakes `Run.wait`; `interrupted` decides that the code is 143, and `end`
has the ranks signalled and sets the clock of `kill`; when the transport's `is_over` says that nothing is left,
`ranks_are_gone` ends the run. A rank that fails comes by `on_message`, and `decide` takes the place of `interrupted`.
Before `Signals` are taken, and between two attempts (`mmm_launch.run.attempts`), SIGTERM ends launch by itself. The
waits, in s:

    to SIGKILL after SIGTERM    --grace; else `SAVING` where ranks have said that they save, else `GRACE`
    after a rank has failed     `failures`: until it is known which rank failed first
    at the end of agents and of mpiexec or srun       `mmm_launch.run.backend`
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
    """Starts what holds the ranks, tells its run what becomes of them, and ends them where the run says so.

    Attributes:
        silent_hosts: hosts from which nothing was heard, where the run could not start because of it.
    """

    silent_hosts: tuple[str, ...] = ()

    @abstractmethod
    def start(self, run: "Run") -> None:
        """Start the ranks, or what starts them."""

    @abstractmethod
    def take_in(self, ready: set[int]) -> None:
        """Tell the run what has happened, by the file descriptors that have something to read."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing is left of the run."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send every fork server a message; a signal for the program also once there are ranks."""

    @abstractmethod
    def end(self, message: Message) -> None:
        """Send every fork server the message that ends its ranks. Where there are none yet, end what starts them."""

    @abstractmethod
    def kill(self) -> None:
        """End every rank by SIGKILL."""

    @abstractmethod
    def finish(self) -> tuple[str, int]:
        """No rank is left: end what has held them.

        Returns:
            How that has ended, in words, and the exit code that this means where ranks had not.
        """

    @abstractmethod
    def clean_up(self) -> None:
        """Whatever has happened, also after an error of launch's own: leave no process."""


class Run:
    """One run of the ranks.

    Attributes:
        transport: reaches the ranks.
        total: number of ranks.
        timeout: seconds without output after which the run hangs; None: it never does.
        has_ranks: ranks have been started: from now on silence counts.
        exit_code: launch's, once it is decided.
        is_over: nothing is left of the run.
        ended: the ranks that have.
        failures: what is known of them.
        cause: the failure that caused the others, once that is decided.
        own_failures: failures known by then. Later ones come of launch's ending the ranks.
        first_at: when the first of them was looked at, `time.monotonic()`.
        again: a new start may help: no signal, no user's mistake.
        saves: ranks have said that they save when somebody ends the run.
        grace: seconds that --grace gives ranks to save; None: it is not given.
        patience: seconds between the signal that ends the ranks and SIGKILL.
        signalled: launch has passed a signal on, for the program to handle.
        output: where launch copies what ranks print, if it does.
        clocks, signals, selector: what it waits for.
    """

    def __init__(
        self, transport: Transport, total: int, timeout: float | None = None, grace: float | None = None
    ) -> None:
        self.transport = transport
        self.total = total
        self.timeout = timeout
        self.grace = grace
        self.patience = GRACE
        self.has_ranks = self.is_over = False
        self.exit_code: int | None = None
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.own_failures: list[Failure] = []
        self.cause: Failure | None = None
        self.first_at: float | None = None
        self.again = self.saves = self.signalled = False
        self.output: Output | None = None
        self.clocks, self.signals, self.selector = Clocks(), Signals(), selectors.DefaultSelector()

    def run(self) -> int:
        """The exit code. No process of the run is left then."""
        self.signals.take(self.selector)
        try:
            self.transport.start(self)
            while not self.is_over:
                ready = self.wait()
                self.transport.take_in(ready)
                # Signals come after the messages: what a rank has said before the signal counts first.
                for number in self.signals.read(ready):
                    self.on_signal(number)
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
        """The file descriptors that have something to read, once one has or a clock is due."""
        self.set_clocks()
        ready = {key.fd for key, _ in self.selector.select(self.clocks.timeout())}
        if self.output is not None:
            self.output.copy(ready)
        return ready

    # What is heard.

    def on_message(self, message: Message, host: str) -> None:
        """What a host's fork server says. host: its name; "": this one."""
        now = time.monotonic()
        if "started" in message:
            self.ranks_started()
        elif "report" in message:
            report = Report(**message["report"])
            if report.kind == "saves":
                self.saves = True
            elif not any(failure.report and failure.rank == report.rank for failure in self.failures):
                self.failed(Failure.reported(report, now - message["ago"], host))
        elif "ended" in message:
            rank, code = message["ended"], message["code"]
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
        """Find the cause, once later failures had time to arrive."""
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
        self.end(signal.SIGTERM, "" if cause.final else failures.in_a_line(cause))

    def name_cause(self) -> Failure:
        """Print the failure that caused the others; its exit code is the run's."""
        self.own_failures = list(self.failures)
        self.cause = failures.cause(self.failures)
        self.ends(self.cause.exit_code, again=self.cause.again and not self.signalled)
        failures.tell(self.cause, self.failures)
        if self.cause.final:
            self.patience = self.time_to_save()
        return self.cause

    def ends(self, exit_code: int, again: bool) -> None:
        """How the run ends is decided."""
        self.exit_code, self.again = exit_code, again
        self.clocks.clear(self.decide)

    def give_up(self, text: str, exit_code: int) -> None:
        """End the ranks of a run that cannot go on."""
        self.ends(exit_code, again=True)
        say(f"launch: {text}")
        self.end(signal.SIGTERM, text)

    def end(self, number: int, reason: str = "") -> None:
        """Send the ranks signal `number`, and SIGKILL after the grace. They can read the reason when it comes."""
        self.clocks.set(self.kill, time.monotonic() + self.patience)
        self.transport.end({"end": number, "reason": reason})

    def kill(self) -> None:
        self.clocks.clear(self.kill)
        self.transport.kill()

    def ranks_are_gone(self) -> None:
        """Nothing is left of the run: its exit code is decided, if it was not."""
        self.clocks.clear(self.kill)
        text, code = self.transport.finish()
        if self.exit_code is None and self.failures:
            self.name_cause()
        elif self.exit_code is None and len(self.ended) < self.total:
            self.ends(code, again=True)
            say(f"launch: {text}")
        self.is_over = True

    # Clocks.

    def set_clocks(self) -> None:
        """The clock that what ranks print sets back."""
        hangs_at = None
        if self.exit_code is None and self.timeout is not None and self.output is not None and self.has_ranks:
            hangs_at = self.output.last + self.timeout
        self.clocks.set(self.hangs, hangs_at)

    def hangs(self) -> None:
        """Nothing has come from any rank for too long."""
        silence = f"no output from any rank for {self.timeout:g} s (--timeout)"
        self.ends(failures.WATCHDOG_EXIT, again=True)
        say(f"launch: {silence}: ending {self.left()}")
        self.end(signal.SIGTERM, silence)

    def left(self) -> str:
        left = self.total - len(self.ended)
        return f"{left} rank{'' if left == 1 else 's'}"

    # Signals.

    def on_signal(self, number: int) -> None:
        # Ctrl-Z: the ranks stop, then launch. It returns from os.kill when the shell continues it.
        if number == signal.SIGTSTP:
            self.transport.send({"signal": signal.SIGSTOP})
            os.kill(os.getpid(), signal.SIGSTOP)
            self.transport.send({"signal": signal.SIGCONT})
        elif number in PASSED_ON:
            self.signalled = True
            self.transport.send({"signal": number})
        elif number == signal.SIGINT and self.signals.is_second_interrupt():
            self.kill()
        elif number in ENDING:
            self.interrupted(number)

    def interrupted(self, number: int) -> None:
        """launch itself was told to end."""
        if self.exit_code is not None:
            self.again = False
            return
        self.ends(128 + number, again=False)
        saving = ""
        if self.saves and number != signal.SIGHUP:
            saving = ", once they have saved"
            if number == signal.SIGINT:
                saving += " (Ctrl-C again: at once)"
        say(f"launch: {signal_name(number)}: ending {self.left()}{saving}")
        if number != signal.SIGHUP:
            self.patience = self.time_to_save()
        self.end(number)

    def time_to_save(self) -> float:
        """Seconds that ranks have where somebody ends the run."""
        if self.grace is not None:
            return self.grace
        return SAVING if self.saves else GRACE
