"""The bubble of a pipeline: how long its ranks wait, computed from a schedule's actions and their seconds.

A schedule is a list of actions for each rank: F forward, B backward, or its two halves, I the gradient of the input and
W that of the weights, of one micro-batch through one stage. `replay` lets every action begin as soon as its rank is
free and what it needs is there::

    F of a stage     needs F of the stage before             I, B    need I or B of the stage after, and their own F
                                                             W       needs its I

so that only the order and the seconds of the actions determine who waits for whom, not how many cores the ranks share,
nor how long a message takes. The bubble is the fraction of ranks × time in which ranks are idle.

For stages that all take the same time there is `mmm.parallel.pp.bubble.bubble_formula`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import schedules

KINDS = "FBIW"


class Action(NamedTuple):
    """kind: F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionSpan(NamedTuple):
    """An action, and when."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """When each rank does what; `rows` by coordinate on pp, each in order."""

    rows: Sequence[Sequence[ActionSpan]]

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        spans = [span for row in self.rows for span in row]
        return max(span.end for span in spans) - min(span.begin for span in spans)

    def idle(self, rank: int) -> float:
        """The fraction of the time in which that rank is idle."""
        return 1 - sum(span.end - span.begin for span in self.rows[rank]) / self.seconds

    @property
    def bubble(self) -> float:
        return sum(self.idle(rank) for rank in range(len(self.rows))) / len(self.rows)


def replay(lists: Sequence[Sequence[Action]], seconds: Callable[[Action], float]) -> PipelineTimeline:
    """Begin every action as early as the order of its rank, and the actions that it needs, allow.

    Args:
        lists: by coordinate on pp, the actions of each rank in order. seconds: of each.

    Raises:
        ValueError: ranks wait for each other or for a missing action; with what each would do next.
    """
    last = max(action.stage for row in lists for action in row)
    ends: dict[Action, float] = {}
    rows: list[list[ActionSpan]] = [[] for _ in lists]
    queues = [deque(actions) for actions in lists]
    while any(queues):
        before = len(ends)
        for row, queue in zip(rows, queues, strict=True):
            while queue:
                action = queue[0]
                ready = _ready(action, last, ends)
                if ready is None:
                    break
                begin = max(row[-1].end if row else 0.0, ready)
                ends[action] = begin + seconds(action)
                row.append(ActionSpan(action, begin, ends[action]))
                queue.popleft()
        if len(ends) == before:
            raise ValueError(f"the schedule is stuck before {', '.join(str(queue[0]) for queue in queues if queue)}")
    return PipelineTimeline(rows)


def _ready(action: Action, last: int, ends: Mapping[Action, float]) -> float | None:
    """When all that an action needs is there; None where some of it has not begun."""
    latest = 0.0
    for either in _needs(action, last):
        arrived = [ends[other] for other in either if other in ends]
        if not arrived:
            return None
        latest = max(latest, arrived[0])
    return latest


def _needs(action: Action, last: int) -> list[tuple[Action, ...]]:
    """The actions that have to precede one: of each tuple, one."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    after = [tuple(Action(stage + 1, half, microbatch) for half in "BI")] if stage < last else []
    return [(Action(stage, "F", microbatch),), *after]


def action_lists(schedule: str, pp: int, microbatches: int, stages: Sequence[Sequence[int]]) -> list[list[Action]]:
    """What each rank does in a step, in order, as PyTorch's schedule has it. Needs no process group.

    GPipe and 1F1B are listed here as PyTorch runs them: there they are code, and its list of 1F1B (2.13) begins with
    micro-batch 1 on the last rank.

    Args:
        schedule: a key of `mmm.parallel.pp.schedules.SCHEDULES`.
        stages: of each rank the numbers of its stages, as `mmm.parallel.pp.schedules.stages_of` gives them:
            ``[[0, 3], [1, 2]]``.
    """
    if schedule in ("GPipe", "1F1B"):
        return [_single(schedule, rank, pp, microbatches) for rank in range(pp)]
    # PyTorch makes the lists of all ranks when it makes a schedule, from no more of its stages than these attributes.
    count = sum(map(len, stages))
    own_stages = [
        SimpleNamespace(
            stage_index=n,
            num_stages=count,
            group_size=pp,
            group_rank=0,
            has_backward=True,
            is_first=n == 0,
            is_last=n == count - 1,
            device=torch.device("cpu"),
            submod=nn.Identity(),
        )
        for n in stages[0]
    ]
    made = getattr(schedules, f"Schedule{schedule}")(
        own_stages, microbatches, loss_fn=lambda *_: None, scale_grads=False
    )
    rows = (made.pipeline_order_with_comms[rank] for rank in range(pp))
    return [[ours for action in row for ours in _actions(action)] for row in rows]


def _actions(action: Any) -> list[Action]:
    """Our actions for one of PyTorch's: two for an overlapped forward and backward, in the order in which it runs them;
    none for communication."""
    parts = action.sub_actions or (action,)
    return [
        Action(a.stage_index, a.computation_type.value, a.microbatch_index)
        for a in parts
        if a.computation_type.value in KINDS
    ]


def _single(schedule: str, rank: int, pp: int, microbatches: int) -> list[Action]:
    ahead = microbatches if schedule == "GPipe" else min(microbatches, pp - rank)
    actions = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(microbatches):
        actions.append(Action(rank, "B", i))
        if ahead + i < microbatches:
            actions.append(Action(rank, "F", ahead + i))
    return actions
