"""The signals that come to launch, or to an agent, while a run lasts: in one place, and as something to read."""

import os
import selectors
import signal
import time
from typing import Any

from mmm.contract import ENDING, REPEAT
from mmm.launch.channel.wire import PASSED_ON


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
