"""How long a rank's host waits for other ranks: what is left of a step's time is the rank's own work.

Every rank of a synchronous step takes as long as the slowest, so its time does not tell which that is.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torch.distributed.distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from mmm.runtime.clock import StepClock
from mmm.torch_private.groups import functional_collectives


@contextmanager
def timed_waits(clock: StepClock) -> Iterator[None]:
    """Inside, the clock knows how long this thread has waited for collectives, sends and receives.

    Only where the host itself waits, by these two functions of PyTorch's: not on CUDA and XPU, whose queues wait, and
    not with `DistributedDataParallel`, which waits in C++. There the clock says NaN.
    """
    waited, thread = 0.0, threading.get_ident()

    def timing(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*given: Any, **named: Any) -> Any:
            nonlocal waited
            if threading.get_ident() != thread:
                return wait(*given, **named)
            began = perf_counter()
            try:
                return wait(*given, **named)
            finally:
                waited += perf_counter() - began

        return timed

    def untimed(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def marking(*given: Any, **named: Any) -> None:
            nonlocal waited
            waited = math.nan
            init(*given, **named)

        return marking

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (Work, "wait", timing),
        (functional_collectives(), "wait_tensor", timing),
        (DistributedDataParallel, "__init__", untimed),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, change in changes:
            setattr(owner, name, change(getattr(owner, name)))
        clock.waited = lambda: waited
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
