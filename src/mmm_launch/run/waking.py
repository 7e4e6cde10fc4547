"""What wakes launch, or an agent, while a run lasts, though no rank has: signals that come to it, and deadlines."""

import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from mmm_launch.channel.instructions import PASSED_ON
from mmm_launch.contract import ENDING, REPEAT


class Signals:
    """From `take` to `give_back` a signal does nothing but to be read.

    Attributes:
        ignored: those that this process was started to ignore.
        previous: what they did before. wake: has something to read once one has come.
        interrupted: when Ctrl-C was first pressed, `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.ignored: set[int] = set()
        self.previous: dict[int, Any] = {}
        self.wake = -1
        self.interrupted: float | None = None

    def take(self, selector: selectors.BaseSelector) -> None:
        """One that launch was started to ignore (nohup, a script's `launch … &`) stays ignored, here and in the ranks;
        except SIGTERM, by which launch itself ends them. The end of a process that launch has started wakes it too.
        """
        self.wake, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        selector.register(self.wake, selectors.EVENT_READ)
        for number in (*ENDING, *PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGTERM:
                self.ignored.add(int(number))
        for number in {*ENDING, *PASSED_ON, signal.SIGTSTP, signal.SIGCHLD} - self.ignored:
            self.previous[number] = signal.signal(number, lambda *_: None)

    def read(self, ready: set[int]) -> bytes:
        """The numbers of those that have come."""
        return os.read(self.wake, 4096) if self.wake in ready else b""

    def is_second_interrupt(self) -> bool:
        """Ctrl-C has come: whether it is another than the first. One press may come as several signals."""
        now = time.monotonic()
        if self.interrupted is None:
            self.interrupted = now
        return now - self.interrupted > REPEAT

    def give_back(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        os.close(signal.set_wakeup_fd(-1))
        os.close(self.wake)


Action = Callable[[], object]


class Clocks:
    """Each action is due at most once, at a time of `time.monotonic()`."""

    def __init__(self) -> None:
        self.deadlines: dict[Action, float] = {}

    def set(self, action: Action, when: float | None) -> None:
        """Have `action` be due at `when`, and no longer when it was before; None: not at all."""
        self.deadlines.pop(action, None)
        if when is not None:
            self.deadlines[action] = when

    def clear(self, action: Action) -> None:
        self.deadlines.pop(action, None)

    def is_set(self, action: Action) -> bool:
        return action in self.deadlines

    def timeout(self) -> float | None:
        """Seconds until the next action is due; None: none is to come."""
        return max(0.0, min(self.deadlines.values()) - time.monotonic()) if self.deadlines else None

    def act(self) -> None:
        """Do what is due, the earliest first. What one action takes back is not done."""
        now = time.monotonic()
        for action in sorted(self.deadlines, key=lambda action: self.deadlines[action]):
            if self.deadlines.get(action, now + 1.0) <= now:
                del self.deadlines[action]
                action()
