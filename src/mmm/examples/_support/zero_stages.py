"""What a rank holds under each stage of ZeRO, with AdamW: measured, and beside it the theory.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mmm.comparison import relative_error, worst
from mmm.examples._support.mistakes import TOLERANCE
from mmm.models.draw import parameter_count
from mmm.parallel.memory.measure import local_elements
from mmm.runtime.process_group import gather_floats
from mmm.trainer.run.core import Run

KINDS = ("parameters", "gradients", "optimizer_state")
MARKS = dict(zip(KINDS, "█▓░", strict=True))
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3")  # by stage


def most_elements(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Of each kind, the elements on the rank that holds most; to be called as `local_elements`. A collective."""
    local = local_elements(model, optimizer)
    everyone = gather_floats([float(local[kind]) for kind in KINDS], device)
    return {kind: int(max(column)) for kind, column in zip(KINDS, zip(*everyone, strict=True), strict=True)}


def theory(stage: int, full: int, ranks: int) -> dict[str, float]:
    """What a rank holds of `full` parameters."""
    shards = [ranks if stage >= first else 1 for first in (3, 2, 1)]
    return {kind: n * full / shard for kind, n, shard in zip(KINDS, (1, 1, 2), shards, strict=True)}


def table(elements: Sequence[dict[str, int]], full: int, ranks: int, width: int) -> str:
    """A line a stage: of each kind, the numbers held and the theory; in all, megabytes of numbers of `width` bytes."""
    heads = [*(kind.replace("_", " ") for kind in KINDS), "all, MB"]
    lines = ["         " + "".join(f"{head:>24}" for head in heads), "stage    " + f"{'local':>12}{'theory':>12}" * 4]
    for stage, numbers in enumerate(elements):
        says = theory(stage, full, ranks)
        cells = "".join(f"{numbers[kind]:>12,}{says[kind]:>12,.0f}" for kind in KINDS)
        megabytes = (sum(values.values()) * width / 1e6 for values in (numbers, says))
        lines.append(f"{stage} {TECHNIQUES[stage]:<7}{cells}" + "".join(f"{size:>12.2f}" for size in megabytes))
    return "\n".join(lines)


def bars(elements: Sequence[dict[str, int]], length: int = 60) -> str:
    """A bar a stage, of the elements that a rank keeps, in units of the most that one does."""
    most = max(sum(numbers.values()) for numbers in elements) or 1
    lines = ["         " + "   ".join(f"{mark} {kind.replace('_', ' ')}" for kind, mark in MARKS.items())]
    for stage, numbers in enumerate(elements):
        ends = [round(sum(list(numbers.values())[:n]) * length / most) for n in range(len(KINDS) + 1)]
        bar = "".join(mark * (ends[n + 1] - ends[n]) for n, mark in enumerate(MARKS.values()))
        lines.append(f"{stage} {TECHNIQUES[stage]:<7}{bar} {sum(numbers.values()) / most:.0%}")
    return "\n".join(lines)


def report_stages(run: Run, stages: Sequence[tuple[dict[str, int], list[float]]], model: nn.Module) -> bool:
    """Log and record what the stages held. Whether their losses are the same.

    Args:
        stages: of each, what the rank that holds most held, and the losses. model: unsharded.
    """
    elements, losses = zip(*stages, strict=True)
    full, limit = parameter_count(model), TOLERANCE[run.precision.name]
    text = table(elements, full, run.layout.dp, run.precision.storage.itemsize)
    run.log.info("numbers kept, on the rank that keeps most\n%s\n\n%s", text, bars(elements), stacklevel=2)
    apart = worst(relative_error(*pair) for curve in losses for pair in zip(curve, losses[0], strict=True))
    run.log.info("the losses of the stages differ by %.1e at most (allowed: %.0e)", apart, limit, stacklevel=2)
    run.describe(parameters=full, local=elements, losses_differ=apart)
    return apart <= limit
