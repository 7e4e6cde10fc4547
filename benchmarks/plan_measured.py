"""A program on real ranks of this machine: its memory by PyTorch's own tracker and what it sends, or its step times.
What predictions are compared with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmm.layout import Techniques
from mmm.nn.experts import has_experts
from mmm.run.comm import TorchComm, talking_through
from mmm.run.run import Run
from mmm.runtime.ranks import Rank, whoami
from mmm.torch_private.dry_run import memory_tracker
from mmm.traffic.count import count_traffic
from mmm.traffic.operators import axes_of
from mmm_lab.planner.sent_calls import SentCall, SentInOrder
from mmm_verify.ranks.ranks import fork_ranks


@contextmanager
def peaks_by_phase(phase: Callable[[], str]) -> Iterator[dict[str, int]]:
    """Inside, count the most bytes that all tensors on the CPU take in each phase, with PyTorch's tracker.

    Yields phase → bytes. The tracker's hooks on modules are left out, because they do not work with pipelines.

    Args:
        phase: function that names the phase that is running.

    Private: MemTracker's methods and attributes, seen in 2.10 to 2.14, _fake_mode_on_entry from 2.13 on. No public
    replacement.
    """
    tracker = memory_tracker()
    cpu = torch.device("cpu")
    peaks: dict[str, int] = {}

    def update(state: Any) -> None:
        size = tracker._curr_mem_snap.get(cpu, {}).get("Total", 0)
        peaks[phase()] = max(size, peaks.get(phase(), 0))

    # The tracker calls this after each change of the memory.
    tracker._update_peak_stats = update
    tracker._fake_mode_on_entry = None
    tracker._track_resize()
    # `MemTracker.__enter__` would set its hooks on modules: only the dispatch mode is entered.
    TorchDispatchMode.__enter__(tracker)
    try:
        yield peaks
    finally:
        tracker._restore_resize()
        TorchDispatchMode.__exit__(tracker, None, None, None)


@dataclass
class Measured:
    """One rank. peaks: bytes of the device's tensors, the most of each phase (`StepClock.phase`)."""

    peaks: dict[str, int]
    calls: list[SentCall]


@dataclass
class Measurement(TorchComm):
    """Measures the run of this process."""

    measured: Measured | None = None

    @contextmanager
    def group(self, run: Run, meet: Callable[..., object]) -> Iterator[None]:
        clock = run.clock
        traffic = SentInOrder(lambda: clock.phase)
        model = getattr(run.job, "model", None)
        ulysses = getattr(run.job, "techniques", Techniques()).ulysses_size(run.layout.cp)
        names = axes_of(run.layout, whoami().rank, model is not None and has_experts(model), ulysses)
        with (
            super().group(run, meet),
            peaks_by_phase(lambda: clock.phase) as peaks,
            count_traffic(traffic=traffic, names=names),
        ):
            yield
        self.measured = Measured(peaks, traffic.calls)


@dataclass
class Stopwatch(TorchComm):
    """Keeps the step times of the run of this process: of each row ``dt``, and the CPU seconds of all of its threads
    meanwhile (without those of an evaluation, a row's step ends with its last lap)."""

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @contextmanager
    def group(self, run: Run, meet: Callable[..., object]) -> Iterator[None]:
        clock = run.clock
        start, read, lap, began, ended = clock.start, clock.read, clock.lap, 0.0, 0.0

        def started() -> None:
            nonlocal began
            start()
            began = time.process_time()

        def lapped(phase: str) -> None:
            nonlocal ended
            lap(phase)
            ended = time.process_time()

        def kept() -> dict[str, float]:
            row = read()
            self.seconds.append(row["dt"])
            self.busy.append(ended - began)
            return row

        clock.start, clock.lap, clock.read = started, lapped, kept  # type: ignore[method-assign]
        with super().group(run, meet):
            yield


class StepTime(NamedTuple):
    """Of a step over all ranks.

    Attributes:
        seconds: of the slowest. busy: what it takes at least with the cores to itself, which other work on the host
            changes least: the CPU seconds of the busiest rank, or of all ranks over the cores.
    """

    seconds: float
    busy: float


def step_times(program: Callable[[], object], ranks: int, timeout: float = 300.0) -> list[StepTime]:
    """Run `program` on forked ranks of this host, with a thread each, and say how long each of its rows took.

    Args:
        timeout: seconds until all are through.
    """
    watches = fork_ranks(_run, ranks, program, Stopwatch(), timeout=timeout)
    cores = len(os.sched_getaffinity(0))
    seconds = [max(of_ranks) for of_ranks in zip(*(watch.seconds for watch in watches), strict=True)]
    busy = [max(*of_ranks, sum(of_ranks) / cores) for of_ranks in zip(*(watch.busy for watch in watches), strict=True)]
    return [StepTime(*of_ranks) for of_ranks in zip(seconds, busy, strict=True)]


def measure(program: Callable[[], object], ranks: int, timeout: float = 300.0) -> list[Measured]:
    """Run `program` on forked ranks of this host, on its CPU. By rank.

    Args:
        timeout: seconds until all are through.
    """
    comms = fork_ranks(_run, ranks, program, Measurement(), timeout=timeout)
    assert all(comm.measured is not None for comm in comms), "the program has started no run"
    return [comm.measured for comm in comms]


def _run(rank: Rank, program: Callable[[], object], comm: TorchComm) -> TorchComm:
    variables = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "LOCAL_RANK": rank.rank}
    variables |= {"LOCAL_WORLD_SIZE": rank.world_size, "MASTER_PORT": rank.port or 0}
    os.environ |= {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": str(rank.address)}
    with talking_through(comm):
        program()
    return comm
