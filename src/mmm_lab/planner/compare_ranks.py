"""Do all ranks make the same collectives? One rank is run for each way in which ranks part.

A rank that runs alone knows which others would have run as it did (`rank_numbers`). So the first rank that none of
those tried stands for is tried next, until each rank has one that stands for it. Groups that have one member among
those tried get a second one: their last. Members of a group have to make the same calls in it, in the same order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from mmm.units import counted
from mmm_lab.planner.dry_run import DryRun, Outcome, RankReport, distinct_others, outcomes
from mmm_lab.planner.sent_calls import SentCall

# Ranks that are tried at most.
MOST = 16
# A message has two ends, which make different calls.
BETWEEN_TWO = ("send", "receive")


@dataclass(frozen=True)
class Comparison:
    """Whether ranks part.

    Attributes:
        tried: the ranks that were run, in their order.
        not_tried: a rank that none of those tried stands for; None if there is none.
        parts: what is wrong, a line each; empty if nothing is.
        calls: number of calls that were compared.
    """

    tried: list[int]
    not_tried: int | None
    parts: list[str]
    calls: int

    def text(self, world_size: int) -> str:
        """Lines for people."""
        tried = ", ".join(f"{rank:,}" for rank in self.tried)
        if self.parts:
            return "\n".join(f"ranks part: {line}" for line in self.parts)
        head = f"compared: ranks {tried}"
        if self.not_tried is not None:
            rest = (
                f"more than {MOST} ranks differ in what their programs compare: rank {self.not_tried:,} was not tried"
            )
            return f"{head}: {counted(self.calls, 'call')} in groups are the same; {rest}, and others"
        return f"{head} stand for all {world_size:,}: {counted(self.calls, 'call')} in groups are the same"


def compare_ranks(program: Callable[[], object], world_size: int) -> tuple[DryRun, Comparison]:
    """Make the dry run of a program, and compare its ranks.

    Raises: as `dry_run`, for rank 0.
    """
    (first,) = outcomes(program, world_size, [0])
    distinct = [0, *distinct_others(first.report(), world_size)]
    tried = {0: first}

    def run(ranks: Iterable[int]) -> None:
        new = [rank for rank in dict.fromkeys(ranks) if rank not in tried]
        # One after another: each takes the memory of a program.
        for rank in new[: MOST - len(tried)]:
            (tried[rank],) = outcomes(program, world_size, [rank])

    run(distinct)
    while (rank := not_stood_for(tried.values())) is not None and len(tried) < MOST:
        run([rank])
    run(lonely_ends(tried))
    reports = [tried[rank].report() for rank in distinct]
    parts = [ended(outcome) for outcome in tried.values() if isinstance(outcome.result, Exception)]
    differences, calls = compared(tried)
    comparison = Comparison(
        tried=sorted(tried),
        not_tried=not_stood_for(tried.values()),
        parts=[*parts, *differences],
        calls=calls,
    )
    return DryRun(world_size, reports), comparison


def not_stood_for(outcomes: Iterable[Outcome]) -> int | None:
    """The first rank that none of those tried stands for."""
    alone = ~np.logical_or.reduce([outcome.alike for outcome in outcomes])
    return int(alone.argmax()) if alone.any() else None


def groups_of(tried: Mapping[int, Outcome]) -> dict[tuple[int, ...], dict[int, list[SentCall]]]:
    """Ranks of a group → rank that was tried → its calls. A rank that failed has none."""
    groups: dict[tuple[int, ...], dict[int, list[SentCall]]] = {}
    for rank, outcome in tried.items():
        if isinstance(outcome.result, RankReport):
            for ranks, calls in outcome.result.by_group.items():
                groups.setdefault(ranks, {})[rank] = [sent for sent in calls if sent.call.operation not in BETWEEN_TWO]
    return groups


def lonely_ends(tried: Mapping[int, Outcome]) -> list[int]:
    """A second member of each group that has one among those tried: its last, or its first."""
    lonely = [(ranks, *by_rank) for ranks, by_rank in groups_of(tried).items() if len(by_rank) == 1 < len(ranks)]
    return [ranks[0] if ranks[-1] == member else ranks[-1] for ranks, member in lonely]


def ended(outcome: Outcome) -> str:
    """A line on a rank that does not come through."""
    stands_for = np.flatnonzero(outcome.alike)
    ranks = f"rank {outcome.rank:,}"
    if len(stands_for) > 1:
        ranks += f" (and {len(stands_for) - 1:,} more up to rank {stands_for[-1]:,})"
    lines = str(outcome.result).strip().splitlines()
    line = ""
    for path, number in re.findall(r'File "(.*)", line (\d+)', str(outcome.result)):
        # A library's own lines say nothing of the program.
        if "site-packages" not in path:
            line = f", at {os.path.basename(path)}:{number}"
    return f"{ranks} ends with {lines[-1]}{line}; rank 0 does not"


def compared(tried: Mapping[int, Outcome]) -> tuple[list[str], int]:
    """Where members of a group first make another call, a line for each group; and how many calls were compared."""
    lines = []
    count = 0
    for ranks, by_rank in groups_of(tried).items():
        # A member that makes no call in the group is one that was tried, and has no entry.
        members = [rank for rank in ranks if rank in tried and isinstance(tried[rank].result, RankReport)]
        if len(members) < 2:
            continue
        first, *others = members
        count += len(by_rank.get(first, []))
        for other in others:
            line = first_difference(ranks, first, by_rank.get(first, []), other, by_rank.get(other, []))
            if line:
                lines.append(line)
                break
    return lines, count


def first_difference(
    ranks: Sequence[int],
    first: int,
    calls: Sequence[SentCall],
    other: int,
    other_calls: Sequence[SentCall],
) -> str:
    """A line on the first call that two members of a group do not both make; empty if there is none."""
    for i, (one, two) in enumerate(zip_longest(calls, other_calls), 1):
        if _essence(one) != _essence(two):
            axis = (one or two).axis
            group = f"{axis} ({counted(len(ranks), 'rank')})"
            return f"call {i} in {group}: rank {first:,} {_said(one)}; rank {other:,} {_said(two)}"
    return ""


def _essence(sent: SentCall | None) -> tuple[object, ...] | None:
    """What all members of a group have to have alike."""
    if sent is None:
        return None
    return sent.call.operation, sent.call.payload, sent.call.root


def _said(sent: SentCall | None) -> str:
    if sent is None:
        return "makes no call any more"
    size = f" of {sent.call.payload:,} bytes" if sent.call.payload else ""
    return f"makes {sent.call.operation}{size} ({sent.phase}, {sent.line})"
