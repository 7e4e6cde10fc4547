"""The life of one run, wherever its ranks are and whatever has started them.

    STARTING ──▶ RUNNING ──▶ ENDING ──▶ DONE       ENDING: the exit code is decided, and what is left is being ended;
                                                   a run that goes well needs none

`Run` hears of the ranks by a `Transport`, decides, and has the ranks signalled by it. `LocalRanks` are this host's,
over pipes to their fork server; `RemoteRanks` are over links to agents, on many hosts.

From SIGTERM to the exit code: `Signals` has it wake `Run.wait`; `interrupted` decides that the code is 143, and `end`
has the transport send it to the ranks and sets the clock of `kill`; when the transport's `advance` says that nothing is
left, `ranks_are_gone` ends the run. A rank that fails comes by `failed`, and `decide` takes the place of `interrupted`.
Before `Signals` are taken, and between two attempts (`mmm_launch.run.attempts`), SIGTERM ends launch by
itself. The waits, in s:

    to SIGKILL after SIGTERM    --grace; else `SAVING` where ranks have said that they save, else `GRACE`
    more of it on other hosts   `remote.LAST_WORDS`
    after a rank has failed     `failures`: until it is known which rank failed first
    at the end of agents        `one_backend.REMOVAL` with --stage, else `remote.LAUNCHER_END`
"""

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from enum import Enum

from mmm_launch.channel import failures
from mmm_launch.channel.failures import Failure, say, signal_name
from mmm_launch.channel.wire import PASSED_ON
from mmm_launch.contract import ENDING
from mmm_launch.run import stacks
from mmm_launch.run.output import Output
from mmm_launch.run.waking import Clocks, Signals
from mmm_launch.spec.walltime import Limits

GRACE = 1.0  # s that ranks have between the signal that ends them and SIGKILL
SAVING = 60.0  # s, the same of ranks that save when somebody ends the run, and no --grace says otherwise


class RunState(Enum):
    """Where a run is."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"


class Transport(ABC):
    """Starts what holds the ranks, tells its run what becomes of them, and ends them where the run says so.

    Attributes:
        margin: seconds beyond the ranks' grace after which the run kills them itself.
    """

    margin = 0.0

    @abstractmethod
    def start(self, run: "Run") -> None:
        """Start the ranks, or what starts them."""

    @abstractmethod
    def take_in(self, ready: set[int]) -> None:
        """Tell the run what has happened, by the file descriptors that have something to read."""

    @abstractmethod
    def advance(self) -> bool:
        """Do what follows, now that the run has decided what that means. True once nothing is left of the run."""

    @abstractmethod
    def forward(self, number: int) -> None:
        """Send every rank a signal that is the program's to handle, once there are ranks."""

    @abstractmethod
    def end(self, number: int, reason: str, grace: float | None) -> bool:
        """Send every rank signal `number`, which ends it, and tell it the reason. False if there is none yet."""

    @abstractmethod
    def kill(self) -> None:
        """End every rank by SIGKILL."""

    @abstractmethod
    def locate(self) -> None:
        """Find out where the ranks are, and call `Run.located`."""

    @abstractmethod
    def finish(self) -> tuple[str, int]:
        """No rank is left: end what has held them.

        Returns:
            How what held the ranks has ended, in words, and the exit code that this means if they had not.
        """

    @abstractmethod
    def clean_up(self) -> None:
        """Whatever has happened, also after an error of launch's own: leave no process."""

    def stop(self) -> None:
        """Ctrl-Z: stop launch, until it is continued."""
        os.kill(os.getpid(), signal.SIGSTOP)


class Run:
    """One run; launch's part of it. An agent's is `mmm_launch.host.agent_supervisor`.

    Attributes:
        transport: reaches the ranks.
        total: number of ranks.
        limits: what the command line says of time.
        state: where it is.
        exit_code: launch's, once it is decided.
        ended: the ranks that have.
        failures: what is known of them. cause: the one that caused the others, once that is decided.
        own_failures: those known by then. Later ones come of launch's ending the ranks.
        silent_hosts: hosts whose agents have not connected, where the run has ended because of it.
        first_at: when the first of them was looked at, `time.monotonic()`.
        again: a new start may help: no signal, no user's mistake.
        saves: ranks have said that they save when somebody ends the run.
        grace: s, of the signal that ends the ranks; None: GRACE.
        signalled: the signal before the job's end is out.
        output: where launch copies what ranks print, if it does.
        clocks, signals, selector: what it waits for.
    """

    def __init__(
        self,
        transport: Transport,
        total: int,
        limits: Limits | None = None,
    ) -> None:
        self.transport, self.limits = transport, limits or Limits()
        self.signalled = False
        self.output: Output | None = None
        self.clocks, self.signals, self.selector = Clocks(), Signals(), selectors.DefaultSelector()
        self.total = total
        self.state = RunState.STARTING
        self.exit_code: int | None = None
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.own_failures: list[Failure] = []
        self.cause: Failure | None = None
        self.silent_hosts: list[str] = []
        self.first_at: float | None = None
        self.again = self.saves = False
        self.grace: float | None = None

    def run(self) -> int:
        """The exit code. No process of the run is left then."""
        self.signals.take(self.selector)
        if self.limits.signal in self.signals.ignored:
            name = signal_name(self.limits.signal)
            say(
                f"launch: --signal: {name} is ignored here (a script's `launch … &` ignores SIGINT, nohup SIGHUP), so "
                "it is by ranks that do not handle it themselves"
            )
        try:
            self.transport.start(self)
            while self.state is not RunState.DONE:
                self.transport.take_in(self.wait())
                self.decide()
                self.set_clocks()  # something may have come out
                self.clocks.act()
                if self.transport.advance():
                    self.ranks_are_gone()
            assert self.exit_code is not None
            return self.exit_code
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
        for number in self.signals.read(ready):
            self.on_signal(number)
        if self.output is not None:
            self.output.copy(ready)
        return ready

    # What the transport tells.

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def rank_ended(self, rank: int) -> None:
        self.ended.add(rank)

    def will_save(self) -> None:
        self.saves = True

    def ranks_started(self) -> None:
        """The ranks have been started, or told to: from now on silence counts."""
        if self.state is RunState.STARTING:
            self.state = RunState.RUNNING
        if self.output is not None:
            self.output.last = time.monotonic()

    # Decisions.

    def decide(self) -> None:
        """Find the cause, once later failures had time to arrive."""
        if self.exit_code is not None or not self.failures:
            return
        now = time.monotonic()
        self.first_at = now if self.first_at is None else self.first_at
        due = self.first_at + failures.patience(self.failures)
        if now >= due or len(self.ended) == self.total:
            first = self.name_cause()
            self.end(signal.SIGTERM, "" if first.final else failures.in_a_line(first))
        else:
            self.clocks.set(self.decide, due)

    def name_cause(self) -> Failure:
        """Print the failure that caused the others; its exit code is the run's."""
        self.own_failures = list(self.failures)
        self.cause = first = failures.cause(self.failures)
        self.ends(first.exit_code, again=first.again and not self.signalled)
        failures.tell(first, self.failures)
        if first.final:
            self.grace = self.grace_to_save()
        return first

    def ends(self, exit_code: int, again: bool) -> None:
        """How the run ends is decided."""
        self.state, self.exit_code, self.again = RunState.ENDING, exit_code, again
        self.clocks.clear(self.decide)

    def give_up(self, text: str, exit_code: int) -> None:
        """End the ranks of a run that cannot go on."""
        self.ends(exit_code, again=True)
        say(f"launch: {text}")
        self.end(signal.SIGTERM, text)

    def end(self, number: int, reason: str = "") -> None:
        """Send the ranks signal `number`, and SIGKILL after the grace. They can read the reason when it comes."""
        self.clocks.set(self.kill, time.monotonic() + (self.grace or GRACE) + self.transport.margin)
        if not self.transport.end(number, reason, self.grace):  # there is nothing that could end in order
            self.kill()

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
        self.exit_code = self.exit_code or 0
        self.state = RunState.DONE

    # Clocks.

    def set_clocks(self) -> None:
        """Those that change while nothing happens, or by what ranks print."""
        self.clocks.set(self.hangs, self.idle_at())
        self.clocks.set(self.signal_ranks, self.signal_due())

    def idle_at(self) -> float | None:
        """When a run that goes on printing nothing hangs."""
        if self.limits.timeout is None or self.output is None or self.state is not RunState.RUNNING:
            return None
        return self.output.last + self.limits.timeout

    def hangs(self) -> None:
        """Nothing has come from any rank for too long."""
        self.ends(failures.WATCHDOG_EXIT, again=True)
        say(f"launch: {self.silence()}: ending {self.left()}")
        self.transport.locate()

    def located(self, stacks_of_ranks: dict[int, stacks.Stack], hosts: dict[int, str]) -> None:
        """Say which ranks hang, and end all."""
        if text := stacks.explain(stacks_of_ranks, hosts):
            say(text)
        self.end(signal.SIGTERM, self.silence())

    def silence(self) -> str:
        return f"no output from any rank for {self.limits.timeout:g} s (--timeout)"

    def signal_due(self) -> float | None:
        """time.monotonic() at which the signal before the job's end is due; None if there is none."""
        if self.limits.signal is None or self.signalled or self.exit_code is not None:
            return None
        return time.monotonic() + self.limits.signal_at - time.time()

    def signal_ranks(self) -> None:
        self.signalled = True
        number = self.limits.signal or 0
        left = max((self.limits.job_end or 0.0) - time.time(), 0.0)
        say(f"launch: {left:.0f} s before the job's end: {signal_name(number)} to {self.left()}")
        self.transport.forward(number)

    def left(self) -> str:
        left = self.total - len(self.ended)
        return f"{left} rank{'' if left == 1 else 's'}"

    # Signals.

    def on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self.transport.stop()
        if number in PASSED_ON:
            self.transport.forward(number)
        if number not in ENDING:
            return
        if number == signal.SIGINT and self.signals.is_second_interrupt():
            self.kill()
        else:
            self.interrupted(number)

    def interrupted(self, number: int) -> None:
        """launch itself was told to end."""
        if self.exit_code is not None:
            self.again = False
            return
        self.ends(128 + number, again=False)
        saving = ", once they have saved" if self.saves and number != signal.SIGHUP else ""
        saving += " (Ctrl-C again: at once)" if saving and number == signal.SIGINT else ""
        say(f"launch: {signal_name(number)}: ending {self.left()}{saving}")
        self.grace = None if number == signal.SIGHUP else self.grace_to_save()
        self.end(number)

    def grace_to_save(self) -> float | None:
        """Seconds, where somebody ends the run."""
        return self.limits.grace or (SAVING if self.saves else None)
