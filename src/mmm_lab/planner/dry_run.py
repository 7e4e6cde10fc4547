"""The dry run of a program: each of its distinct ranks, in its own process, on this host, without its devices.

The ranks of one pipeline stage hold and send the same, except where a size does not divide: then the first of them has
the largest shards. So rank 0 stands for a run without a pipeline. With one, the first rank of the first stage, of the
last, and of the largest stage between them are run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from mmm.errors import ConfigError, UserError
from mmm.torch_private.fake import NEEDS_ELEMENTS
from mmm_lab.planner.held import HeldTensors
from mmm_lab.planner.no_harm import forbid_writing
from mmm_lab.planner.program import Rehearsal, rehearsing
from mmm_lab.planner.sent_calls import SentCall
from mmm_lab.planner.tracker import MemoryPeak
from mmm_verify.ranks.children import Child, Children, ended


@dataclass(frozen=True)
class RankReport:
    """What one rank would hold and send.

    Attributes:
        held: the run's layout, device and precision, and which shards of its tensors the rank has.
        peaks: the most bytes held at once in each phase of the run (`StepClock.phase`), in their order.
        calls: calls to process groups in the last step, in their order.
        seconds: seconds that the dry run took.
        by_group: ranks of a group → all that this rank did in it, in its order, also before the last step.
    """

    rank: int
    held: HeldTensors
    peaks: dict[str, MemoryPeak]
    calls: list[SentCall]
    seconds: float
    by_group: dict[tuple[int, ...], list[SentCall]] = field(default_factory=dict)

    @property
    def coordinates(self) -> dict[str, int]:
        """The rank's coordinate on each axis."""
        return self.held.layout.coordinates(self.rank)

    @property
    def peak(self) -> MemoryPeak:
        """The most bytes at once in the whole run."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


@dataclass(frozen=True)
class DryRun:
    """What a run of `world_size` ranks would be, by its distinct ranks."""

    world_size: int
    ranks: list[RankReport]

    @property
    def worst(self) -> RankReport:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda report: report.peak.bytes)


class ProgramExited(Exception):
    """The program of a dry run started no run, and ended with an exit code other than 0, which is the only argument.

    It has printed the reason itself.
    """


def dry_run(program: Callable[[], object], world_size: int, rank: int | None = None) -> DryRun:
    """Run a program as some ranks of `world_size`, one after another, without the other ranks and without devices.

    Args:
        program: starts one run (`mmm.run.run.start_run`), and ends by itself after a few steps.
        rank: the only rank to run; None for the distinct ones.

    Raises:
        UserError: the program refuses what was asked for, as it would on that rank.
        ProgramExited: the program started no run, and ended with another exit code than 0.
        RuntimeError: the program failed otherwise. The message has its traceback.
    """
    (outcome,) = outcomes(program, world_size, [rank or 0])
    first = outcome.report()
    others: list[int] = []
    if rank is None:
        others = distinct_others(first, world_size)
    return DryRun(world_size, [first, *(other.report() for other in outcomes(program, world_size, others))])


def distinct_others(first: RankReport, world_size: int) -> list[int]:
    """The distinct ranks besides rank 0."""
    sizes = first.held.stage_sizes
    pp = len(sizes)
    if pp < 2:
        return []
    stages = [pp - 1]
    if pp > 2:
        # The stage with the most parameters stands for all between the first and the last.
        stages.insert(0, max(range(1, pp - 1), key=sizes.__getitem__))
    # pp is the outermost axis.
    return [stage * world_size // pp for stage in stages]


class Outcome(NamedTuple):
    """What the dry run of a rank ended with.

    Attributes:
        result: its report, or what ended it.
        alike: (world_size,) bool, the ranks that would have run as this one did.
    """

    rank: int
    result: RankReport | Exception
    alike: np.ndarray

    def report(self) -> RankReport:
        """Its report. Raises what ended it, if there is none."""
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def outcomes(program: Callable[[], object], world_size: int, ranks: Sequence[int]) -> list[Outcome]:
    """Run a program as each of some ranks, in a forked process of its own."""
    with tempfile.TemporaryDirectory(prefix="mmm-dry-run-") as folder, Children() as children:
        running = [(rank, children.fork(partial(_child, program, world_size, folder, rank))) for rank in ranks]
        return [_outcome_of(rank, child) for rank, child in running]


def _outcome_of(rank: int, child: Child) -> Outcome:
    try:
        return Outcome(rank, *child.end.recv())
    except (EOFError, OSError):
        raise RuntimeError(f"dry run of rank {rank}: its process {ended(child.stop(1.0))}") from None


def _child(
    program: Callable[[], object],
    world_size: int,
    folder: str,
    rank: int,
    end: Connection,
) -> None:
    """Run one rank in this process, and send its report, or the reason why there is none.

    Args:
        folder: for its temporary files.
    """

    def stop_at_once(error: ConfigError) -> None:
        answer(error)
        os._exit(2)

    def answer(result: RankReport | Exception) -> None:
        end.send((result, rehearsal.alike.alike))

    # What the program prints is not shown. The process ends soon, and closes the file then.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    began = time.perf_counter()
    result: RankReport | Exception
    try:
        with rehearsing(rank, world_size) as rehearsal:
            forbid_writing(folder, stop_at_once)
            try:
                program()
            except SystemExit as stop:
                if rehearsal.memory is None:
                    # Only then: the exit code of a text is found by printing it.
                    code = _exit_code(stop)
                    if code:
                        raise ProgramExited(code) from None
        result = _report(rehearsal, time.perf_counter() - began)
    except (UserError, ProgramExited) as error:
        result = error
    except NEEDS_ELEMENTS as error:
        result = ConfigError(
            f"dry run: the program makes tensors whose size depends on the elements of others, by {error.func}, and "
            "tensors have no elements here: only real ranks can try it"
        )
    except BaseException:
        # Whatever it is, the process ends with it.
        result = RuntimeError(f"dry run of rank {rank} of {world_size} failed:\n{traceback.format_exc()}")
    # The parent does not wait for this process once it has the answer.
    sys.stderr.flush()
    answer(result)


def _exit_code(stop: SystemExit) -> int:
    """The exit code that the interpreter would end with. As there, a text is printed and means 1."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _report(rehearsal: Rehearsal, seconds: float) -> RankReport:
    """The report of a rank whose program has ended.

    Raises:
        ConfigError: the program started no run, or made no model.
    """
    if not (rehearsal.memory and rehearsal.held and rehearsal.traffic):
        raise ConfigError(
            "dry run: the program did not start a run by `start_run`: leave out flags that make it do something else"
        )
    peaks = rehearsal.memory.peaks()
    if not peaks:
        raise ConfigError("dry run: the program made no model, and nothing else is counted: there is nothing to show")
    # In the first step stages of a pipeline also infer shapes, and wrappers set themselves up.
    phases = [sent.phase for sent in rehearsal.traffic.calls if sent.phase.startswith("step ")]
    last_step = max(phases, default="", key=lambda phase: int(phase.split()[1]))
    return RankReport(
        rank=rehearsal.rank,
        held=rehearsal.held,
        peaks=peaks,
        calls=[sent for sent in rehearsal.traffic.calls if sent.phase == last_step],
        seconds=seconds,
        by_group=_by_group(rehearsal),
    )


def _by_group(rehearsal: Rehearsal) -> dict[tuple[int, ...], list[SentCall]]:
    """What a rank did in each of its groups."""
    assert rehearsal.traffic is not None
    ranks_of = {axis: ranks for ranks, axis in rehearsal.axes.items()}
    ranks_of.setdefault("world", tuple(range(rehearsal.world_size)))
    by_group: dict[tuple[int, ...], list[SentCall]] = {}
    for sent in rehearsal.traffic.all:
        # A group on no axis has its ranks in its name.
        ranks = ranks_of.get(sent.axis) or tuple(map(int, sent.axis.split()[1:]))
        by_group.setdefault(ranks, []).append(sent)
    return by_group
