"""Tells a clock which of PyTorch's calls wait for other ranks, by replacing them while a run lasts.

A rank waits in these places, with gloo on a CPU, and with NCCL and XCCL on an accelerator:

- ``Work.wait``, of a collective that was called with ``async_op=True``, of a send or of a receive. On a CPU also of one
  that was called without.
- the operator ``_c10d_functional::wait_tensor``, by which functional collectives wait: those of DTensor, of tensor
  parallelism, of experts, and those inside of compiled graphs.
- on an accelerator, a collective without ``async_op``: its kernel runs on the current stream.
- on an accelerator, ``Stream.wait_event``: FSDP runs its collectives on streams of its own, for which it makes the
  compute stream wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroup, Work
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from mmm.runtime.clock import StepClock, stream_module
from mmm.torch_private.groups import collective_methods, replaced_wait
from mmm.torch_private.replace import Place, all_replaced

# Returns a function to call in place of its argument.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def timed_waits(clock: StepClock) -> Iterator[None]:
    """Inside, the clock knows how long this rank waits for others.

    Two things make that unknown from then on, and the clock says NaN. `DistributedDataParallel` waits in C++. And on an
    accelerator with FSDP's ``CPUOffloadPolicy``, one wait is for collectives and for the rank's own copies between host
    and device.
    """

    def waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with clock.waiting():
                return wait(*args, **kwargs)

        return timed

    def waiting_of_stream(wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(stream: Any, *args: Any, **kwargs: Any) -> Any:
            with clock.waiting(stream):
                return wait(stream, *args, **kwargs)

        return timed

    def waiting_unless_async(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def timed(*args: Any, **kwargs: Any) -> Any:
            options = (*args, *kwargs.values())
            runs_here = any(getattr(option, "asyncOp", True) is False for option in options)
            if not runs_here:
                return collective(*args, **kwargs)
            with clock.waiting():
                return collective(*args, **kwargs)

        return timed

    def unknown(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def marking(*args: Any, **kwargs: Any) -> None:
            clock.knows_waits = False
            init(*args, **kwargs)

        return marking

    changes: list[tuple[Place, Change]] = [
        ((Work, "wait"), waiting),
        ((DistributedDataParallel, "__init__"), unknown),
    ]
    streams = stream_module(clock.device)
    if streams is not None:
        # `wait_stream` calls `wait_event`.
        changes.append(((streams.Stream, "wait_event"), waiting_of_stream))
        changes.append(((CPUOffloadPolicy, "__init__"), unknown))
        for name in collective_methods():
            changes.append(((ProcessGroup, name), waiting_unless_async))
    timed_places = [(place, change(getattr(*place))) for place, change in changes]
    with replaced_wait(clock.device, waiting), all_replaced(timed_places):
        clock.knows_waits = True
        yield
