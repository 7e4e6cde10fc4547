"""The dry run of a program: each of its distinct ranks, in a process of its own, on this host, without its devices.

Ranks of one pipeline stage hold and send the same, up to what does not divide: the first of them has the largest
shards. So rank 0 stands for a run without a pipeline; with one, the first rank of the first and of the last stage, and
of the stage between them that has the most parameters.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait

from mmm.errors import ConfigError, UserError
from mmm_lab.planner.held import HeldTensors
from mmm_lab.planner.program import Rehearsal, rehearsing
from mmm_lab.planner.sent_calls import SentCall
from mmm_lab.planner.tracker import MemoryPeak
from mmm_verify.ranks.children import Child, Children, ended

AT_ONCE = 2  # processes


@dataclass(frozen=True)
class RankReport:
    """What one rank would hold and send.

    Attributes:
        held: which shards of its tensors it has, and on which layout.
        stages: as of `Rehearsal`.
        peaks: the most bytes at once in each phase of the run (`StepClock.phase`), in their order.
        calls: to process groups in the last step, in their order.
        seconds: that the dry run took. notes: of what was chosen where no flag says.
    """

    rank: int
    held: HeldTensors
    device: str
    precision: str
    stages: tuple[int, ...]
    peaks: dict[str, MemoryPeak]
    calls: list[SentCall]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def coordinates(self) -> dict[str, int]:
        """Its place on each axis."""
        return self.held.layout.coordinates(self.rank)

    @property
    def peak(self) -> MemoryPeak:
        """The most bytes of the run."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes)

    @property
    def peak_of_steps(self) -> int:
        """The most bytes once the model is there: of steps and evaluations."""
        return max(peak.bytes for phase, peak in self.peaks.items() if phase != "start")


@dataclass(frozen=True)
class DryRun:
    """What a run of `world_size` ranks would be, by its distinct ranks."""

    world_size: int
    ranks: list[RankReport]

    @property
    def worst(self) -> RankReport:
        """Of the ranks, the one that needs the most memory."""
        return max(self.ranks, key=lambda report: report.peak.bytes)


class ProgramExited(Exception):
    """The program of a dry run has ended with an exit code other than 0, its only argument, and started no run. It has
    said why."""


def dry_run(program: Callable[[], object], world_size: int, rank: int | None = None) -> DryRun:
    """Run a program as rank after rank of `world_size`, on nothing.

    Args:
        program: starts one run (`mmm.run.run.start_run`), and ends by itself after a few steps.
        rank: the only one; None for the distinct ones.

    Raises:
        UserError: whatever the program itself refuses, on the rank that it would be raised on.
        ProgramExited: the program has ended with another exit code than 0, and started no run.
        RuntimeError: the program failed otherwise; with its traceback.
    """
    child = partial(_child, program, world_size)
    first, *_ = _in_processes(child, world_size, [rank or 0])
    others = [] if rank is not None else _others(first, world_size)
    return DryRun(world_size, [first, *_in_processes(child, world_size, others)])


def _others(first: RankReport, world_size: int) -> list[int]:
    """The distinct ranks besides rank 0."""
    pp = len(first.stages)
    if pp < 2:
        return []
    between = range(1, pp - 1)
    stages = [max(between, key=lambda stage: first.stages[stage]), pp - 1] if between else [pp - 1]
    return [stage * world_size // pp for stage in stages]


def _in_processes(
    of_rank: Callable[[int, Connection], None], world_size: int, ranks: Sequence[int]
) -> list[RankReport]:
    found: dict[int, RankReport] = {}
    waiting = list(ranks)
    running: dict[Connection, tuple[int, Child]] = {}
    with Children() as children:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                rank = waiting.pop(0)
                child = children.fork(partial(of_rank, rank))
                running[child.end] = rank, child
            for end in [each for each in wait([*running]) if isinstance(each, Connection)]:
                rank, child = running.pop(end)
                try:
                    result = end.recv()
                except (EOFError, OSError):
                    raise RuntimeError(f"dry run of rank {rank}: its process {ended(child.stop(1.0))}") from None
                if isinstance(result, (UserError, ProgramExited)):
                    raise result
                if isinstance(result, str):
                    raise RuntimeError(f"dry run of rank {rank} of {world_size} failed:\n{result}")
                found[rank] = result
    return [found[rank] for rank in ranks]


def _child(program: Callable[[], object], world_size: int, rank: int, end: Connection) -> None:
    """One rank: send its report, or why there is none."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    began = time.perf_counter()
    result: RankReport | UserError | ProgramExited | str
    try:
        with rehearsing(rank, world_size) as rehearsal:
            try:
                program()
            except SystemExit as stop:
                if rehearsal.memory is None and (code := _exit_code(stop)):
                    raise ProgramExited(code) from None
        result = _report(rehearsal, time.perf_counter() - began)
    except (UserError, ProgramExited) as error:
        result = error
    except BaseException:  # whatever it is, the process ends with it
        result = traceback.format_exc()
    sys.stderr.flush()  # nobody waits for this process once it has answered
    end.send(result)


def _exit_code(stop: SystemExit) -> int:
    """What the interpreter would make of it: a text is printed."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _report(rehearsal: Rehearsal, seconds: float) -> RankReport:
    held, device, traffic = rehearsal.held, rehearsal.device, rehearsal.traffic
    if held is None or device is None or traffic is None:
        raise ConfigError(
            "dry run: the program has started no run, which is by `start_run`: leave out what has it do something else"
        )
    peaks = rehearsal.peaks()
    if not peaks:
        raise ConfigError("dry run: the program makes no model, and nothing else is counted: there is nothing to show")
    steps = {sent.phase for sent in traffic.calls if sent.phase.startswith("step ")}
    last = max(steps, default="", key=lambda phase: int(phase.split()[1]))
    calls = [sent for sent in traffic.calls if sent.phase == last]
    return RankReport(
        rehearsal.rank,
        held,
        device.type,
        rehearsal.precision,
        rehearsal.stages,
        peaks,
        calls,
        seconds,
        rehearsal.notes,
    )
