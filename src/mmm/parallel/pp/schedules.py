"""The pipeline schedules: what each of them needs, where its stages lie, and whether it goes with the other techniques.

With V stages a rank and p = 2 ranks, the stages lie on the ranks like this::

                loop (V = 2)     V (ZBVZeroBubble, DualPipeV)
    rank 0        0   2            0   3
    rank 1        1   3            1   2

The last stage computes the loss: in a loop on the last rank, in a V on rank 0, which also has the first stage.

Needs no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout, Techniques
from mmm.torch_private.faults import DEEP, FEW, SPLIT_CHUNKS


@dataclass(frozen=True)
class Schedule:
    """What a schedule needs.

    Attributes:
        min_stages: the fewest stages that a rank may have.
        max_stages: the most stages that a rank may have; None for any number.
        v_shaped: whether the order of stages goes through the ranks and back (0 1 1 0), and not round and round
            (0 1 0 1).
        splits: whether the schedule splits backward in two, which works neither with torch.compile nor with selective
            checkpointing.
        microbatches: function of pp that returns two integers: the minimum of the number of micro-batches, and an
            integer that divides this number.
        schedule_class: a class to use instead of PyTorch's ``Schedule<NAME>``; None for PyTorch's.
    """

    min_stages: int = 1
    max_stages: int | None = 1
    v_shaped: bool = False
    splits: bool = False
    microbatches: Callable[[int], tuple[int, int]] = lambda pp: (1, 1)
    schedule_class: Any = None


SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule(),
    "1F1B": Schedule(microbatches=lambda pp: (pp, 1)),
    "Interleaved1F1B": Schedule(min_stages=2, max_stages=None, microbatches=lambda pp: (pp, pp)),
    "LoopedBFS": Schedule(min_stages=2, max_stages=None),
    "InterleavedZeroBubble": Schedule(min_stages=2, max_stages=None, splits=True, microbatches=lambda pp: (pp, pp)),
    "ZBVZeroBubble": Schedule(min_stages=2, max_stages=2, v_shaped=True, splits=True),
    "DualPipeV": Schedule(min_stages=2, max_stages=2, v_shaped=True, splits=True, microbatches=lambda pp: (2 * pp, 1)),
}


def stages_of(coordinate: int, pp: int, schedule: str, stages_per_rank: int) -> list[int]:
    """The numbers of the stages on the rank with this coordinate on pp."""
    if SCHEDULES[schedule].v_shaped:
        return [coordinate, 2 * pp - 1 - coordinate]
    return [coordinate + turn * pp for turn in range(stages_per_rank)]


def choices_of(schedule: str, pp: int, microbatches: int, loss_chunks: int = 1) -> list[str]:
    """What a PyTorch may not be able to do, by the names of `mmm.torch_private.faults`."""
    choices = [schedule]
    if microbatches < pp:
        choices.append(FEW)
    if pp > 2:
        choices.append(DEEP)
    if loss_chunks > 1 and SCHEDULES[schedule].splits:
        choices.append(SPLIT_CHUNKS)
    return choices


def check_pipeline(
    layout: Layout,
    techniques: Techniques,
    batch: int,
    parts: int,
    dtype: str = "",
) -> tuple[int, int]:
    """Check that a schedule goes with the layout, the batch and the model.

    Args:
        layout: fitted to the number of ranks.
        techniques: the schedule, and where they are given, stages per rank and micro-batches.
        batch: number of samples of a step, per data-parallel coordinate.
        parts: number of parts of the model that stages can be made of (`stages.parts_of`).
        dtype: name of the precision; empty if it is not known.

    Returns:
        Stages per rank and micro-batches: those of the techniques, or where these leave them open, the fewest that the
        schedule takes.

    Raises:
        ConfigError: no such schedule, or a dtype that a pipeline cannot train in.
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    if dtype == "fp16":
        raise ConfigError(
            f"{config_field('dtype')} fp16 scales the loss up, by a factor that all stages would have to agree on: use "
            f"bf16 or fp32"
        )
    pp = layout.pp
    name = techniques.schedule
    if name not in SCHEDULES:
        choices = ", ".join(SCHEDULES)
        raise ConfigError(f"{config_field('schedule')} {name!r} is not one of {choices}")
    schedule = SCHEDULES[name]
    stages_per_rank = techniques.stages_per_rank
    if stages_per_rank is None:
        stages_per_rank = schedule.min_stages
    microbatches = techniques.microbatches
    if microbatches is None:
        microbatches, _ = schedule.microbatches(pp)
    stages = pp * stages_per_rank
    problems = []
    if pp < 2:
        problems.append(f"pp {pp}: a pipeline has at least 2 ranks; on 1 there is nothing to split")
    too_many = schedule.max_stages is not None and stages_per_rank > schedule.max_stages
    if stages_per_rank < schedule.min_stages or too_many:
        if schedule.max_stages == schedule.min_stages:
            takes = f"exactly {schedule.min_stages}"
        else:
            takes = f"at least {schedule.min_stages}"
        problems.append(f"{config_field('stages_per_rank')} {stages_per_rank}: {name} takes {takes}")
    elif stages > parts:
        advice = "use fewer stages, or a model with more layers"
        if schedule.min_stages > 1 and pp <= parts:
            advice += ", or a schedule with one stage a rank (1F1B)"
        problems.append(
            f"pp {pp} with {stages_per_rank} stages a rank is {stages} stages, and the model has {parts} parts to put "
            f"into them: {advice}"
        )
    problems += _microbatch_problems(name, pp, microbatches, batch)
    if schedule.splits:
        problems += _split_problems(techniques)
    if problems:
        raise LayoutError("; ".join(problems))
    return stages_per_rank, microbatches


def _split_problems(techniques: Techniques) -> list[str]:
    """What does not go with a schedule that splits the backward of a stage in two: a sentence each."""
    problems = []
    reason = f"with {techniques.schedule}, which splits the backward of a stage in two"
    if techniques.compile:
        name = config_field("compile")
        problems.append(
            f"{name} {reason}: PyTorch cannot split a compiled one; leave {name} out, or use 1F1B or Interleaved1F1B"
        )
    if techniques.checkpointing == "selective":
        problems.append(
            f"{config_field('checkpointing')} selective {reason}: PyTorch returns each saved tensor only once; use "
            f"full, or 1F1B, or Interleaved1F1B"
        )
    return problems


def _microbatch_problems(schedule: str, pp: int, microbatches: int, batch: int) -> list[str]:
    """What is wrong with a number of micro-batches: one sentence, or nothing."""
    least, multiple = SCHEDULES[schedule].microbatches(pp)
    reasons = []
    if microbatches < least:
        reasons.append(f"{schedule} with pp {pp} needs at least {least}")
    if microbatches < 1:
        reasons.append("it must be at least 1")
    else:
        if microbatches % multiple:
            reasons.append(f"{schedule} needs a multiple of pp {pp}")
        if batch % microbatches:
            reasons.append(
                f"a batch of {batch} a data-parallel coordinate cannot be split into {microbatches} equal parts"
            )
    if not reasons:
        return []
    name = config_field("microbatches")
    text = ", and ".join(reasons)
    return [f"{name} {microbatches}: {text}"]
