"""The schedules of a pipeline: what each asks for, where its stages lie, and whether it goes with the rest.

With V stages a rank, and p = 2, the stages lie on the ranks as

                loop (V = 2)     V (ZBVZeroBubble, DualPipeV)
    rank 0        0   2            0   3         ← the last stage, and so the loss, is where the first is
    rank 1        1   3            1   2

Needs no process group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmm.errors import ConfigError, LayoutError, config_field
from mmm.layout import Layout, Techniques


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for.

    Attributes:
        least, most: stages a rank (most: None for any number).
        v: stages lie on the ranks there and back, not round and round.
        splits: splits backward in two, which works neither with torch.compile nor with selective checkpointing.
        microbatches: the least number, and what it must be a multiple of, from the number of pp ranks.
        own: the class, where it is not PyTorch's ``Schedule<NAME>``.
    """

    least: int = 1
    most: int | None = 1
    v: bool = False
    splits: bool = False
    microbatches: Callable[[int], tuple[int, int]] = lambda pp: (1, 1)
    own: Any = None


SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule(),
    "1F1B": Schedule(microbatches=lambda pp: (pp, 1)),
    "Interleaved1F1B": Schedule(least=2, most=None, microbatches=lambda pp: (pp, pp)),
    "LoopedBFS": Schedule(least=2, most=None),
    "InterleavedZeroBubble": Schedule(least=2, most=None, splits=True, microbatches=lambda pp: (pp, pp)),
    "ZBVZeroBubble": Schedule(least=2, most=2, v=True, splits=True),
    "DualPipeV": Schedule(least=2, most=2, v=True, splits=True, microbatches=lambda pp: (2 * pp, 1)),
}


def stages_of(coordinate: int, pp: int, schedule: str, stages_per_rank: int) -> list[int]:
    """The numbers of the stages on the rank with that coordinate on pp."""
    if SCHEDULES[schedule].v:
        return [coordinate, 2 * pp - 1 - coordinate]
    return [coordinate + turn * pp for turn in range(stages_per_rank)]


def check_pipeline(layout: Layout, techniques: Techniques, batch: int, parts: int, dtype: str = "") -> tuple[int, int]:
    """Whether a schedule goes with the layout, the batch and the model.

    Args:
        layout: fitted to the number of ranks.
        batch: samples of a step, per data-parallel coordinate. parts: of the model, that stages can be made of
            (`stages.parts_of`).
        dtype: name of the precision, where it is known.

    Returns:
        Stages per rank and micro-batches: the techniques', or where those leave them open the fewest that the schedule
        takes.

    Raises:
        ConfigError: no such schedule, or a dtype that a pipeline cannot train in.
        LayoutError: every rule that is broken, with its numbers and what to change.
    """
    if dtype == "fp16":
        raise ConfigError(
            f"{config_field('dtype')} "
            "fp16 scales the loss up, by a factor that all stages would have to agree on: use bf16 or "
            "fp32"
        )
    schedule, pp = techniques.schedule, layout.pp
    if schedule not in SCHEDULES:
        raise ConfigError(f"{config_field('schedule')} {schedule!r} is not one of {', '.join(SCHEDULES)}")
    kind = SCHEDULES[schedule]
    stages_per_rank = kind.least if techniques.stages_per_rank is None else techniques.stages_per_rank
    microbatches = kind.microbatches(pp)[0] if techniques.microbatches is None else techniques.microbatches
    wrong = []
    if pp < 2:
        wrong.append(f"pp {pp}: a pipeline has at least 2 ranks; on 1 there is nothing to split")
    if stages_per_rank < kind.least or (kind.most is not None and stages_per_rank > kind.most):
        takes = f"exactly {kind.least}" if kind.most == kind.least else f"at least {kind.least}"
        wrong.append(f"{config_field('stages_per_rank')} {stages_per_rank}: {schedule} takes {takes}")
    elif pp * stages_per_rank > parts:
        wrong.append(
            f"pp {pp} with {stages_per_rank} stages a rank is {pp * stages_per_rank} stages, and the model has {parts} "
            "parts to put into them: use fewer, or a model with more layers"
            + (", or a schedule with one stage a rank (1F1B)" if kind.least > 1 and pp <= parts else "")
        )
    wrong += _microbatch_problems(schedule, pp, microbatches, batch)
    wrong += _split_problems(schedule, techniques) if kind.splits else []
    if wrong:
        raise LayoutError("; ".join(wrong))
    return stages_per_rank, microbatches


def _split_problems(schedule: str, techniques: Techniques) -> list[str]:
    """What does not go with a schedule that splits the backward of a stage in two."""
    wrong = []
    why = f"with {schedule}, which splits the backward of a stage in two"
    if techniques.compile:
        wrong.append(
            f"{config_field('compile')} {why}: PyTorch cannot split a compiled one; leave "
            f"{config_field('compile')} out, or use 1F1B or Interleaved1F1B"
        )
    if techniques.checkpointing == "selective":
        wrong.append(
            f"{config_field('checkpointing')} selective {why}: PyTorch gives back once what was kept; use full, "
            f"or 1F1B, or Interleaved1F1B"
        )
    return wrong


def _microbatch_problems(schedule: str, pp: int, microbatches: int, batch: int) -> list[str]:
    name, (least, multiple) = config_field("microbatches"), SCHEDULES[schedule].microbatches(pp)
    why = []
    if microbatches < least:
        why.append(f"{schedule} with pp {pp} needs at least {least}")
    if microbatches < 1:
        why.append("it must be at least 1")
    else:
        if microbatches % multiple:
            why.append(f"{schedule} needs a multiple of pp {pp}")
        if batch % microbatches:
            why.append(f"a batch of {batch} a data-parallel coordinate cannot be split into {microbatches} equal parts")
    return [f"{name} {microbatches}: {', and '.join(why)}"] if why else []
