"""Wakes launch, or an agent, for signals and deadlines, while it waits for messages."""

import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from mmm_launch.channel.instructions import PASSED_ON
from mmm_launch.contract import ENDING, REPEAT


class Signals:
    """Signals that come to this process. Between `take` and `give_back` they can be read, and have no other effect.

    Attributes:
        ignored: signals that this process was started to ignore.
        previous: signal → its handler before `take`.
        wake: file descriptor that has something to read once a signal has come.
        interrupted: when Ctrl-C was first pressed, by `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.ignored: set[int] = set()
        self.previous: dict[int, Any] = {}
        self.wake = -1
        self.interrupted: float | None = None

    def take(self, selector: selectors.BaseSelector) -> None:
        """Take over the signals.

        A signal that launch was started to ignore (nohup, a script's `launch … &`) stays ignored, here and in the
        ranks. SIGTERM is the exception: by it launch itself ends the ranks.
        """
        # Python writes the number of each signal into this pipe. It must never block inside a signal handler.
        self.wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        selector.register(self.wake, selectors.EVENT_READ)
        for signum in (*ENDING, *PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(signum) == signal.SIG_IGN and signum != signal.SIGTERM:
                self.ignored.add(int(signum))
        # SIGCHLD: the end of a process that launch has started wakes it too.
        for signum in {*ENDING, *PASSED_ON, signal.SIGTSTP, signal.SIGCHLD} - self.ignored:
            self.previous[signum] = signal.signal(signum, lambda *_: None)

    def read(self, ready: set[int]) -> bytes:
        """Return the numbers of the signals that have come, one byte each."""
        if self.wake not in ready:
            return b""
        return os.read(self.wake, 4096)

    def is_second_interrupt(self) -> bool:
        """Say whether this Ctrl-C is a second one. One press may arrive as several signals within `REPEAT` seconds."""
        now = time.monotonic()
        if self.interrupted is None:
            self.interrupted = now
        return now - self.interrupted > REPEAT

    def give_back(self) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)
        os.close(signal.set_wakeup_fd(-1))
        os.close(self.wake)


Action = Callable[[], object]


class Clocks:
    """Actions that are due at a time of `time.monotonic()`, each at most once.

    Attributes:
        deadlines: action → when it is due.
    """

    def __init__(self) -> None:
        self.deadlines: dict[Action, float] = {}

    def set(self, action: Action, when: float | None) -> None:
        """Make `action` due at `when`, in place of any earlier time for it. None: it is not due at all."""
        self.deadlines.pop(action, None)
        if when is not None:
            self.deadlines[action] = when

    def clear(self, action: Action) -> None:
        self.deadlines.pop(action, None)

    def is_set(self, action: Action) -> bool:
        return action in self.deadlines

    def timeout(self) -> float | None:
        """Return the seconds until the next action is due. None: no action is set."""
        if not self.deadlines:
            return None
        return max(0.0, min(self.deadlines.values()) - time.monotonic())

    def act(self) -> None:
        """Do every action that is due, the earliest first."""
        now = time.monotonic()
        # An action may clear another one that is due as well, or put it off: look it up again.
        for action in sorted(self.deadlines, key=lambda action: self.deadlines[action]):
            if self.deadlines.get(action, now + 1.0) <= now:
                del self.deadlines[action]
                action()
