"""Do all ranks make the same collectives? One rank is run for each way in which ranks part.

A rank that runs alone knows which others would have run as it did (`rank_numbers`). So the first rank that none of
those tried stands for is tried next, until each rank has one that stands for it. The last members of rank 0's groups
are tried as well. Members of a group have to make the same calls in it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

import numpy as np

from mmm.units import counted
from mmm_lab.planner.dry_run import DryRun, Outcome, RankReport, distinct_others, outcomes
from mmm_lab.planner.sent_calls import SentCall

# Ranks that are tried at most.
MOST = 16
# A message has two ends, which make different calls.
BETWEEN_TWO = ("send", "receive")


def compare_ranks(program: Callable[[], object], world_size: int) -> tuple[DryRun, list[str], str]:
    """Make the dry run of a program, and compare its ranks.

    Returns:
        The dry run; a line for each way in which ranks part; and a line on which ranks were compared.

    Raises: as `dry_run`, for the ranks that it tries.
    """
    tried: dict[int, Outcome] = {}

    def run(ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank not in tried and len(tried) < MOST:
                (tried[rank],) = outcomes(program, world_size, [rank])

    run([0])
    first = tried[0].report()
    distinct = [0, *distinct_others(first, world_size)]
    run(distinct)
    reports = [tried[rank].report() for rank in distinct]
    alone = _first_alone(tried)
    while alone is not None and len(tried) < MOST:
        run([alone])
        alone = _first_alone(tried)
    run([ranks[-1] for ranks in first.by_group])

    parting = []
    for outcome in tried.values():
        if isinstance(outcome.result, Exception):
            parting.append(_ending(outcome))
    parting += _differences(tried)
    ranks = ", ".join(f"{rank:,}" for rank in sorted(tried))
    calls = sum(map(len, first.by_group.values()))
    stand = f"stand for all {world_size:,}"
    if alone is not None:
        stand = f"were compared, which are all that are tried: rank {alone:,} differs from each of them"
    summary = f"ranks {ranks} {stand}; rank 0 makes {counted(calls, 'call')} in groups"
    return DryRun(world_size, reports), parting, summary


def _first_alone(tried: dict[int, Outcome]) -> int | None:
    """The first rank that none of those tried stands for."""
    alike = [outcome.alike for outcome in tried.values()]
    alone = np.flatnonzero(~np.logical_or.reduce(alike))
    if len(alone) == 0:
        return None
    return int(alone[0])


def _ending(outcome: Outcome) -> str:
    """A line on a rank that ends with an error."""
    alike = np.flatnonzero(outcome.alike)
    others = f"{len(alike) - 1:,} more, up to rank {alike[-1]:,}"
    # The last line of a traceback is the error.
    error = str(outcome.result).strip().splitlines()[-1]
    return f"rank {outcome.rank:,} (and {others}) ends with {error}; rank 0 does not"


def _differences(tried: dict[int, Outcome]) -> Iterator[str]:
    """A line on each member of a group that makes another call in it than its first member that was tried."""
    reports = {}
    for rank, outcome in tried.items():
        if isinstance(outcome.result, RankReport):
            reports[rank] = outcome.result
    groups = dict.fromkeys(ranks for report in reports.values() for ranks in report.by_group)
    for ranks in groups:
        first, *others = [rank for rank in ranks if rank in reports]
        for other in others:
            calls = zip_longest(_calls(reports[first], ranks), _calls(reports[other], ranks))
            for place, (one, two) in enumerate(calls, 1):
                if _essence(one) != _essence(two):
                    where = f"call {place} in a group of {counted(len(ranks), 'rank')}"
                    yield f"{where}: rank {first:,} {_described(one)}; rank {other:,} {_described(two)}"
                    break


def _calls(report: RankReport, ranks: tuple[int, ...]) -> list[SentCall]:
    """The calls of a rank in a group, but for messages between two."""
    calls = report.by_group.get(ranks, ())
    return [sent for sent in calls if sent.call.operation not in BETWEEN_TWO]


def _essence(sent: SentCall | None) -> tuple[object, ...] | None:
    """What all members of a group have to have alike."""
    if sent is None:
        return None
    return sent.call.operation, sent.call.payload, sent.call.root


def _described(sent: SentCall | None) -> str:
    if sent is None:
        return "makes no call any more"
    call = sent.call
    return f"makes {call.operation} of {call.payload:,} bytes ({sent.axis}, {sent.phase}, {sent.line})"
