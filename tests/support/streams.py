"""Streams and events of a device that is not there, which know the time, and collectives that take some of it.

A stream's time is when all that is in its queue is done. Nothing begins before the host has put it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import FakeWork
from torch.distributed.distributed_c10d import ProcessGroup, Work

from mmm.torch_private.groups import collective_methods


class Host:
    """Its time, in seconds, and how often it has waited for the device."""

    now = 0.0
    waits = 0


class Stream:
    """A queue of work, as torch.cuda.Stream."""

    current: Stream

    def __init__(self, *_: Any, **__: Any) -> None:
        self.end = 0.0
        self.before: list[Stream] = []

    @property
    def time(self) -> float:
        return max(self.end, Host.now)

    def work(self, seconds: float) -> None:
        self.end = self.time + seconds

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Host.waits += 1

    def __enter__(self) -> Stream:
        self.before.append(Stream.current)
        Stream.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        Stream.current = self.before.pop()


class Event:
    """A mark in a queue, as torch.cuda.Event."""

    made = 0
    time = 0.0

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self.timed = enable_timing
        Event.made += enable_timing

    def record(self, stream: Stream | None = None) -> None:
        self.time = (stream or Stream.current).time

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        stream.end = max(stream.end, self.time)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Host.waits += 1

    def elapsed_time(self, later: Event) -> float:
        assert self.timed
        assert later.timed
        return 1000 * (later.time - self.time)


class Network:
    """Collectives as NCCL runs them: on the current stream, or, if they are asynchronous, on one of its own.

    Attributes:
        late: seconds by which the other ranks come later than this one to each collective.
    """

    SECONDS = 1.0

    def __init__(self) -> None:
        self.stream = Stream()
        self.late = 0.0

    def collective(self, asynchronous: bool) -> None:
        stream = self.stream if asynchronous else Stream.current
        stream.end = max(stream.time, Stream.current.time) + self.late + self.SECONDS

    def wait(self) -> None:
        """As ``Work.wait`` of the last collective that was asynchronous."""
        Stream.current.end = max(Stream.current.end, self.stream.end)

    def install(self, replace: Callable[[Any, str, Any], object] = setattr) -> None:
        """Have all process groups, which are to be of the backend ``fake``, communicate over this network.

        Args:
            replace: puts a function in the place of an owner's method: (owner, name, function).
        """
        for name in (*collective_methods(), "send", "recv"):
            replace(ProcessGroup, name, self._timed(getattr(ProcessGroup, name)))
        replace(Work, "wait", lambda work, *_: self.wait())
        # What the fake backend returns has a method of its own. What NCCL returns has not.
        replace(FakeWork, "wait", lambda work, *args: Work.wait(work, *args))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **named: Any) -> Any:
            # Sends and receives have no such option: they are asynchronous.
            options = [value for value in (*args, *named.values()) if hasattr(value, "asyncOp")]
            self.collective(all(option.asyncOp for option in options))
            return method(*args, **named)

        return timed


def start() -> Network:
    """Begin anew: at 0 s, with an empty queue."""
    Host.now = 0.0
    Host.waits = 0
    Event.made = 0
    Stream.current = Stream()
    return Network()
