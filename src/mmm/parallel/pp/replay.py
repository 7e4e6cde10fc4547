"""The bubble of a pipeline: how long its ranks wait, computed from a schedule's actions and their seconds.

A schedule is a list of actions for each rank. An action takes one micro-batch through one stage: F is its forward, B
its backward; I and W are the two halves of a backward, the gradient of the input and that of the weights. `replay` lets
every action begin as soon as its rank is free and the actions that it needs have ended::

    F of a stage     needs F of the stage before             I, B    need I or B of the stage after, and their own F
                                                             W       needs its I

So only the order and the seconds of the actions determine who waits for whom, not how many cores the ranks share, nor
how long a message takes. The bubble is the fraction of ranks × time in which ranks are idle.

For stages that all take the same time there is `mmm.parallel.pp.bubble.bubble_formula`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from mmm.errors import LayoutError
from mmm.parallel.pp.schedules import SCHEDULES
from mmm.runtime.device import refuse_faults
from mmm.torch_private.pipelining import actions_of

# Forward, backward, and the two halves of a backward. PyTorch's other kinds of action communicate, and are left out.
KINDS = "FBIW"


class Action(NamedTuple):
    """One micro-batch through one stage. `kind` is F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class ActionSpan(NamedTuple):
    """An action, with its begin and end in seconds."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """When each rank does what.

    Attributes:
        rows: the spans of each rank in order, by coordinate on pp.
    """

    rows: Sequence[Sequence[ActionSpan]]

    @property
    def seconds(self) -> float:
        """Seconds from the first begin, at 0, to the last end."""
        return max(span.end for row in self.rows for span in row)

    @property
    def bubble(self) -> float:
        """The fraction of ranks × time in which ranks are idle."""
        busy = sum(span.end - span.begin for row in self.rows for span in row)
        return 1 - busy / (len(self.rows) * self.seconds)


def replay(
    actions_by_rank: Sequence[Sequence[Action]],
    seconds: Callable[[Action], float],
) -> PipelineTimeline:
    """Simulate a step: every action begins as soon as its rank is free and the actions that it needs have ended.

    Args:
        actions_by_rank: the actions of each rank in order, by coordinate on pp.
        seconds: function that returns how long an action takes.

    Raises:
        ValueError: ranks wait for each other or for a missing action. The message has the next action of each rank.
    """
    last_stage = max(action.stage for actions in actions_by_rank for action in actions)
    ends: dict[Action, float] = {}
    rows: list[list[ActionSpan]] = [[] for _ in actions_by_rank]
    queues = [deque(actions) for actions in actions_by_rank]
    while any(queues):
        done = len(ends)
        for row, queue in zip(rows, queues, strict=True):
            # Begin this rank's actions until one needs an action that has not begun yet.
            while queue:
                action = queue[0]
                ready = _ready(action, last_stage, ends)
                if ready is None:
                    break
                free = row[-1].end if row else 0.0
                begin = max(free, ready)
                ends[action] = begin + seconds(action)
                row.append(ActionSpan(action, begin, ends[action]))
                queue.popleft()
        if len(ends) == done:
            next_actions = [str(queue[0]) for queue in queues if queue]
            raise ValueError(f"the schedule is stuck before {', '.join(next_actions)}")
    return PipelineTimeline(rows)


def _ready(action: Action, last_stage: int, ends: Mapping[Action, float]) -> float | None:
    """When the last of the actions that this one needs ends; None where one of them has not begun."""
    stage, kind, microbatch = action
    needs = []
    if kind == "F" and stage > 0:
        needs.append(Action(stage - 1, "F", microbatch))
    if kind == "W":
        needs.append(Action(stage, "I", microbatch))
    if kind in "BI":
        # The stage's own forward, and the gradient from the next stage, whose backward may be split or not.
        needs.append(Action(stage, "F", microbatch))
        full_backward = Action(stage + 1, "B", microbatch)
        half_backward = Action(stage + 1, "I", microbatch)
        if stage < last_stage:
            needs.append(full_backward if full_backward in ends else half_backward)
    if any(other not in ends for other in needs):
        return None
    return max((ends[other] for other in needs), default=0.0)


def action_lists(
    schedule: str,
    pp: int,
    microbatches: int,
    stages: Sequence[Sequence[int]],
) -> list[list[Action]]:
    """What each rank does in a step, in order, as PyTorch's schedule has it. Needs no process group.

    PyTorch runs GPipe and 1F1B by loops and not from a list of actions, so their lists are made here. PyTorch 2.13 does
    make a list of 1F1B as well, but it is wrong: on the last rank it begins with micro-batch 1.

    Args:
        schedule: a key of `mmm.parallel.pp.schedules.SCHEDULES`.
        stages: the numbers of each rank's stages, as `mmm.parallel.pp.schedules.stages_of` gives them, such as
            ``[[0, 3], [1, 2]]``.

    Raises:
        LayoutError: the schedule is a class of one's own that runs a loop.
        DeviceError: this PyTorch runs the schedule wrongly.
    """
    if schedule in ("GPipe", "1F1B"):
        return [_one_stage_actions(schedule, rank, pp, microbatches) for rank in range(pp)]
    refuse_faults(schedule)
    # When a schedule of PyTorch is constructed, on any rank, it makes the lists of all ranks. Rank 0 is simulated here.
    # From the stages of the rank the constructor reads only these attributes.
    stage_count = sum(map(len, stages))
    own_stages = []
    for stage_id in stages[0]:
        own_stages.append(
            SimpleNamespace(
                stage_index=stage_id,
                num_stages=stage_count,
                group_size=pp,
                group_rank=0,
                has_backward=True,
                is_first=stage_id == 0,
                is_last=stage_id == stage_count - 1,
                device=torch.device("cpu"),
                submod=nn.Identity(),
            )
        )
    make = SCHEDULES[schedule].schedule_class or getattr(schedules, f"Schedule{schedule}")
    if not issubclass(make, schedules.PipelineScheduleMulti):
        raise LayoutError(
            f"{schedule}: {make.__name__} runs a loop and has no lists of actions, as a PipelineScheduleMulti has, so "
            "there is no chart of it: leave out --timeline"
        )
    constructed = make(own_stages, microbatches, loss_fn=lambda *_: None, scale_grads=False)
    lists = []
    for rank in range(pp):
        actions = [Action(*action) for action in actions_of(constructed, rank)]
        lists.append([action for action in actions if action.kind in KINDS])
    return lists


def _one_stage_actions(schedule: str, rank: int, pp: int, microbatches: int) -> list[Action]:
    """The actions of GPipe or 1F1B, with one stage a rank."""
    if schedule == "GPipe":
        # All forwards come before the first backward.
        ahead = microbatches
    else:
        # Enough forwards to reach the last stage; then one backward for each forward.
        ahead = min(microbatches, pp - rank)
    actions = [Action(rank, "F", i) for i in range(ahead)]
    for i in range(microbatches):
        actions.append(Action(rank, "B", i))
        if ahead + i < microbatches:
            actions.append(Action(rank, "F", ahead + i))
    return actions
