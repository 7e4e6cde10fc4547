"""The deadlines of a run, in one place: what is to be done when, though nothing has happened."""

import time
from collections.abc import Callable

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

    def clear(self, *actions: Action) -> None:
        for action in actions:
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
