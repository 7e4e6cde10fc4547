"""Failures of ranks: what went wrong on which rank, which failure caused the others, and how it is printed, once."""

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
    """A rank that ended badly, by its own report or by its exit code.

    Attributes:
        rank: number of the rank.
        exit_code: the exit code that the run gets if this failure is its cause.
        time: when the failure was noticed where it happened, by `time.monotonic()` of this host.
        doubt: how likely it is the consequence of another failure. 0: it is a cause. 1: SIGABRT, which may be a
            consequence. 2: a lost connection. 3: the rank has saved its state, which is not a failure.
        report: the rank's own report, if it sent one.
        text: what launch prints if there is no report; else the report's text.
        host: name of the rank's host; "": this one.
        final: whether somebody has ended the run, so that it must not be started again.
        lost: how the connection to the rank's host broke, if it did.
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
        """Make the failure of a rank that has reported why it ends."""
        # A rank that complains about a lost connection ended because another rank was gone.
        doubt = 0
        if report.kind == "traceback" and any(sign in report.text for sign in CONSEQUENCES):
            doubt = 2
        return cls(report.rank, report.exit_code, time, doubt, report, report.text, host)

    @classmethod
    def ended(cls, rank: int, pid: int, code: int, time: float, host: str) -> "Failure":
        """Make the failure of a rank that has ended without a report.

        Args:
            code: its exit code, or minus the number of the signal that has killed it.
        """
        if code < 0:
            # NCCL and Gloo abort a rank whose peer is gone, so SIGABRT may be a consequence. 128 + the signal's number
            # is the exit code that a shell gives.
            text = f"rank {rank} (pid {pid}) was killed by {signal_name(-code)} on {host or socket.gethostname()}"
            return cls(rank, 128 - code, time, int(-code == signal.SIGABRT), text=text, host=host)
        if code == SAVED_EXIT:
            text = "a signal has stopped the run, and its state is saved: --resume auto continues from there"
            return cls(rank, code, time, 3, text=text, host=host)
        text = f"rank {rank} exited with code {code}"
        if host:
            text += f" on {host}"
        return cls(rank, code, time, text=text, host=host)

    @classmethod
    def of_user(cls, rank: int, text: str) -> "Failure":
        """Make the failure of a user's mistake that was found before the ranks ran."""
        report = Report(rank, "user", text, USER_ERROR_EXIT, 0.0)
        return cls(rank, USER_ERROR_EXIT, time.monotonic(), report=report)

    @property
    def is_killed(self) -> bool:
        """Whether a signal has killed the rank."""
        return self.report is None and not self.lost and self.exit_code > 128

    @property
    def is_layout(self) -> bool:
        """Whether the layout of CMD refuses this number of ranks."""
        return self.report is not None and self.report.kind == "layout"

    @property
    def again(self) -> bool:
        """Whether a new start may help. After the user's own mistake it would end in the same way."""
        return not self.final and self.exit_code != USER_ERROR_EXIT


def cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest of those that look least like a consequence."""
    return min(failures, key=lambda f: (f.doubt, f.time))


def patience(failures: Sequence[Failure]) -> float:
    """Return the seconds to wait, after the first failure, for the message of an earlier one."""
    if all(failure.exit_code == SAVED_EXIT for failure in failures):
        return WAIT_SAVED
    if all(failure.doubt for failure in failures):
        return WAIT_DOUBTFUL
    return WAIT


def tell(first: Failure, failures: Sequence[Failure]) -> None:
    """Print `first`, the failure that caused the other `failures`."""
    report = first.report
    host = first.host or socket.gethostname()
    is_users = report is not None and report.is_users
    # What a rank was printing, such as a bar, has not ended its line.
    if not is_users and sys.stderr.isatty():
        say("")
    if report is None:
        say(f"launch: {first.text}")
    elif report.kind == "traceback":
        other_ranks = {failure.rank for failure in failures} - {first.rank}
        after = ""
        if other_ranks:
            after = f"; {len(other_ranks)} more failed after it"
        say(f"launch: rank {first.rank} failed on {host}{after}:\n{report.text.rstrip()}")
    elif is_users:
        say(f"error: {report.text}")
    else:
        say(report.text.rstrip("\n"))


def in_a_line(first: Failure) -> str:
    """Return what `tell` prints in one line, for the ranks that launch ends."""
    if first.report is None:
        return first.text
    lines = first.text.strip().splitlines() or [f"exit code {first.exit_code}"]
    text = " ".join(lines)
    # The last line of a traceback is the error itself.
    if first.report.kind == "traceback":
        text = lines[-1]
    return shorten(f"rank {first.rank} on {first.host or socket.gethostname()}: {text}", LINE)


def signal_name(signum: int) -> str:
    # Real-time signals, such as 35, have no name of their own.
    if signum not in set(signal.Signals):
        return f"signal {signum}"
    return signal.Signals(signum).name


def end_of_process(code: int) -> tuple[str, int]:
    """Describe the end of a process of launch's own that should not have ended.

    Returns:
        How it ended, in words, and the exit code that launch gets.
    """
    if code < 0:
        return f"was killed by {signal_name(-code)}", 128 - code
    return f"exited with code {code}", code or 1


def say(text: str) -> None:
    # If nobody reads stderr any more, or its disk is full, launch still has ranks to end.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
