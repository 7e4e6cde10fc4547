"""The life of one run, whatever started its ranks: failures, the signals that come to launch, and its clocks.

`Supervisor` (this host's ranks) and `Controller` (ranks on many hosts) are the two kinds.
"""

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from typing import Any

from mmm.contract import ENDING, REPEAT
from mmm.launch.channel import failures
from mmm.launch.channel.failures import Failure, say, signal_name
from mmm.launch.channel.wire import PASSED_ON
from mmm.launch.plan.walltime import Limits
from mmm.launch.run import stacks
from mmm.launch.run.output import Output

GRACE = 1.0  # s that ranks have between the signal that ends them and SIGKILL
SAVING = 60.0  # s, the same of ranks that save when somebody ends the run, and no --grace says otherwise


class RunControl(ABC):
    """What `Supervisor` and `Controller` have in common. They say how to start, serve, signal and kill."""

    def __init__(self, total: int, limits: Limits | None = None) -> None:
        self.total = total  # ranks
        self.limits = limits or Limits()
        self.termination_reason = ""  # why launch ends the ranks, if not because it was told to
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.exit_code: int | None = None  # once it is decided
        self.decide_at: float | None = None  # when the cause is looked for among the failures known by then
        self.kill_at: float | None = None
        self.grace: float | None = None  # s, of the signal that ends the ranks; None: GRACE
        self.after_failure: float | None = None  # s, the same of those that are left when one has failed
        self.saves = False  # ranks have said that they save when somebody ends the run
        self.interrupted_at = -REPEAT
        self.again = False  # a new start may help: no signal, no user's mistake
        self.attempts_left = 0  # how often --retries may start it after this one
        self.ignored: set[int] = set()  # signals that this process was started to ignore
        self.signalled = False  # the signal before the job's end is out
        self.output: Output | None = None  # where launch copies what ranks print
        self.selector = selectors.DefaultSelector()

    @abstractmethod
    def start(self) -> None:
        """Start the ranks, or what starts them."""

    @abstractmethod
    def serve(self) -> bool:
        """Take in what has happened. False once it is over."""

    @abstractmethod
    def send(self, number: int) -> bool:
        """Send every rank signal `number`. False if there is none yet."""

    @abstractmethod
    def forward_signal(self, number: int) -> None:
        """Send every rank a signal that is the program's to handle, once there are ranks."""

    @abstractmethod
    def kill(self) -> None:
        """End every rank by SIGKILL."""

    @abstractmethod
    def finish(self) -> int:
        """The exit code, once nothing runs."""

    @abstractmethod
    def clean_up(self) -> None:
        """Whatever has happened, also after an error of launch's own: leave no process."""

    def run(self) -> int:
        previous = self.take_signals()
        if self.limits.signal in self.ignored:
            name = signal_name(self.limits.signal)
            say(
                f"launch: --signal: {name} is ignored here (a script's `launch … &` ignores SIGINT, nohup SIGHUP), so "
                "it is by ranks that do not handle it themselves"
            )
        try:
            self.start()
            while self.serve():
                self.decide(time.monotonic())
            return self.finish()
        finally:
            self.clean_up()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.selector.close()
            os.close(signal.set_wakeup_fd(-1))
            os.close(self.wake)

    def wait(self) -> set[int]:
        """The file descriptors that have something to read, once one has or a clock is due."""
        deadlines = [t for t in self.deadlines() if t is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = {key.fd for key, _ in self.selector.select(timeout)}
        if self.wake in ready:
            for number in os.read(self.wake, 4096):
                self.on_signal(number)
        if self.output is not None:
            self.output.copy(ready, self.selector)
        return ready

    def deadlines(self) -> list[float | None]:
        """When `decide` has something to do though nothing has happened, `time.monotonic()`."""
        return [self.decide_at, self.kill_at, self.idle_at(), self.signal_due()]

    def decide(self, now: float) -> None:
        """Find the cause once later failures had time to arrive; kill those whose grace is over; look at the clocks."""
        if self.exit_code is None and self.failures:
            if self.decide_at is None:
                self.first_at = now
            self.decide_at = self.first_at + failures.patience(self.failures)
            if now >= self.decide_at or len(self.ended) == self.total:
                self.fail()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()
        due = self.signal_due()
        if due is not None and now >= due:
            self.signal_ranks()
        idle = self.idle_at()
        if idle is not None and now >= idle:
            self.hangs()

    def fail(self) -> None:
        """Print the failure that caused the others, and end the rest."""
        first = failures.cause(self.failures)
        self.exit_code, self.decide_at = first.exit_code, None
        self.again = first.again and not self.signalled
        failures.tell(first, self.failures)
        self.grace = self.grace_to_save() if first.final else self.after_failure
        self.end(signal.SIGTERM, "" if first.final else failures.in_a_line(first))

    def end(self, number: int, termination_reason: str = "") -> None:
        """Send the ranks signal `number`, and SIGKILL after the grace. They can read the reason when it comes."""
        self.termination_reason, self.kill_at = termination_reason, time.monotonic() + (self.grace or GRACE)
        if not self.send(number):  # none has started: there is nothing that could end in order
            self.kill()

    def idle_at(self) -> float | None:
        if self.limits.timeout is None or self.output is None or self.exit_code is not None:
            return None
        return self.output.last + self.limits.timeout

    def hangs(self) -> None:
        """Nothing has come from any rank for too long."""
        self.exit_code, self.again = failures.WATCHDOG_EXIT, True
        say(f"launch: {self.silence()}: ending {self.left()}")
        self.locate()

    @abstractmethod
    def locate(self) -> None:
        """Find out where the ranks are, and give that to `located`."""

    def located(self, found: dict[int, stacks.Stack], hosts: dict[int, str]) -> None:
        """Say which ranks hang, and end all."""
        if text := stacks.explain(found, hosts):
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
        self.forward_signal(number)

    def left(self) -> str:
        left = self.total - len(self.ended)
        return f"{left} rank{'' if left == 1 else 's'}"

    def take_signals(self) -> dict[int, Any]:
        """Have signals wake `serve`. One that launch was started to ignore (nohup, a script's `launch … &`) stays
        ignored, here and in the ranks; except SIGTERM, by which launch itself ends them."""
        self.wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.selector.register(self.wake, selectors.EVENT_READ)
        previous: dict[int, Any] = {}
        for number in (*ENDING, *PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGTERM:
                self.ignored.add(int(number))
            else:
                previous[number] = signal.signal(number, lambda *_: None)
        return previous

    def on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self.stop()
        if number in PASSED_ON:
            self.forward_signal(number)
        if number not in ENDING:
            return
        now = time.monotonic()
        if number == signal.SIGINT:
            again = self.interrupted_at > 0 and now - self.interrupted_at > REPEAT
            self.interrupted_at = max(self.interrupted_at, now) if self.interrupted_at < 0 else self.interrupted_at
            if again:
                self.kill()
                return
        self.interrupted(number)

    def interrupted(self, number: int) -> None:
        """launch itself was told to end."""
        self.again = False
        if self.exit_code is None:
            self.exit_code = 128 + number
            self.decide_at = None
            saving = ", once they have saved" if self.saves and number != signal.SIGHUP else ""
            saving += " (Ctrl-C again: at once)" if saving and number == signal.SIGINT else ""
            say(f"launch: {signal_name(number)}: ending {self.left()}{saving}")
            self.grace = None if number == signal.SIGHUP else self.grace_to_save()
            self.end(number)

    def grace_to_save(self) -> float | None:
        """Seconds, where somebody ends the run."""
        return self.limits.grace or (SAVING if self.saves else None)

    def stop(self) -> None:
        """Ctrl-Z: stop launch, until it is continued."""
        os.kill(os.getpid(), signal.SIGSTOP)
