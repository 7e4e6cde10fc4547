"""What went wrong on which rank, which of several failures caused the others, and how it is said, once."""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mmm_launch.contract import CONSEQUENCES, SAVED_EXIT, USER_ERROR_EXIT, Report, shorten

# Seconds to wait, after a first failure, for the report of an earlier one.
WAIT = 0.06
# The same, in seconds, if every failure known so far looks like a consequence of another.
WAIT_DOUBTFUL = 0.5
# The same, in seconds, if every rank that has ended so far has saved its state: the others are about to.
WAIT_SAVED = 60.0
# The exit code of the command `timeout`.
WATCHDOG_EXIT = 124
# The most characters of a failure that is told in one line.
LINE = 1000


@dataclass(frozen=True)
class Failure:
    """A rank that ended badly: by its own report, or by how the system says it ended.

    Attributes:
        time: `time.monotonic()` of this host when it was noticed where it happened.
        doubt: 0: a cause. 1: SIGABRT, which may be a consequence. 2: a lost connection. 3: saved, and no failure.
        text: what is said of it where there is no report.
        host: name of the rank's host; "": this one.
        final: somebody ended the run: starting it again is not wanted.
        lost: how the connection to the rank's host broke, where it did.
    """

    rank: int
    exit_code: int
    time: float
    doubt: int = 0
    report: Report | None = None
    text: str = ""
    host: str = ""
    final: bool = False
    lost: str = ""

    @classmethod
    def reported(cls, report: Report, time: float, host: str) -> "Failure":
        is_lost = report.kind == "traceback" and any(sign in report.text for sign in CONSEQUENCES)
        doubt = 2 if is_lost else 0
        return cls(report.rank, report.exit_code, time, doubt, report, host=host)

    @classmethod
    def ended(cls, rank: int, pid: int, code: int, time: float, host: str) -> "Failure":
        """code: its exit code, or minus the signal that has killed it."""
        if code < 0:
            text = f"rank {rank} (pid {pid}) was killed by {signal_name(-code)} on {host or socket.gethostname()}"
            return cls(rank, 128 - code, time, int(-code == signal.SIGABRT), text=text, host=host)
        if code == SAVED_EXIT:
            text = "a signal has stopped the run, and its state is saved: --resume auto goes on from there"
            return cls(rank, code, time, 3, text=text, host=host)
        where = f" on {host}" if host else ""
        return cls(rank, code, time, text=f"rank {rank} exited with code {code}{where}", host=host)

    @classmethod
    def of_user(cls, rank: int, text: str) -> "Failure":
        """A mistake of the user's, found before there was a program to tell it."""
        report = Report(rank, "user", text, USER_ERROR_EXIT, 0.0)
        return cls(rank, USER_ERROR_EXIT, time.monotonic(), report=report)

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended the rank."""
        return self.report is None and not self.lost and self.exit_code > 128

    @property
    def is_layout(self) -> bool:
        """Whether CMD's layout does not take this number of ranks."""
        return self.report is not None and self.report.kind == "layout"

    @property
    def again(self) -> bool:
        """May a new start help? Not after the user's own mistake, which would end the same way."""
        return not self.final and (self.report is None or not self.report.is_users)


def cause(failures: Sequence[Failure]) -> Failure:
    """The failure that came first in order of cause: those that look like a consequence come last."""
    return min(failures, key=lambda f: (f.doubt, f.time))


def patience(found: Sequence[Failure]) -> float:
    """Seconds to wait after the first failure for one that came before it."""
    if all(failure.exit_code == SAVED_EXIT for failure in found):
        return WAIT_SAVED
    return WAIT_DOUBTFUL if all(failure.doubt for failure in found) else WAIT


def tell(first: Failure, failures: Sequence[Failure]) -> None:
    """Print `first`, which caused the others of `failures`."""
    report = first.report
    if report is None:
        say(f"launch: {first.text}")
    elif report.kind == "traceback":
        others = len({f.rank for f in failures} - {first.rank})
        after = f"; {others} more failed after it" if others else ""
        say(f"launch: rank {first.rank} failed on {first.host or socket.gethostname()}{after}:\n{report.text.rstrip()}")
    else:
        say(f"error: {report.text}" if report.is_users else report.text.rstrip("\n"))


def in_a_line(first: Failure) -> str:
    """What `tell` says at length, for the ranks that launch ends."""
    if first.report is None:
        return first.text
    lines = first.report.text.strip().splitlines() or [f"exit code {first.exit_code}"]
    where = f"rank {first.rank} on {first.host or socket.gethostname()}"
    return shorten(f"{where}: {lines[-1] if first.report.kind == 'traceback' else ' '.join(lines)}", LINE)


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def end_of_process(code: int) -> tuple[str, int]:
    """How a process of launch's ended that should not have, in words, and the exit code that this means for launch."""
    if code < 0:
        return f"was killed by {signal_name(-code)}", 128 - code
    return f"exited with code {code}", code or 1


def say(text: str) -> None:
    # If nobody reads stderr any more, or its disk is full, launch still has ranks to end.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
