"""What a rank holds under each stage of ZeRO with AdamW, as measured and as in theory.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mmm.examples._support.by_hand import most_of_ranks, same_losses
from mmm.nn.init import parameter_count
from mmm.parallel.memory.measure import local_elements
from mmm.run.run import Run

KINDS = ("parameters", "gradients", "optimizer_state")
# The first stage that shards each kind.
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer_state": 1}
# The name of each stage.
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3")


def most_elements(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """The elements of each kind on the rank that holds most. A collective of all ranks.

    Call it while there are gradients, as `local_elements`.
    """
    local = local_elements(model, optimizer)
    return most_of_ranks({kind: local[kind] for kind in KINDS}, device)


def theory(stage: int, full: int, ranks: int) -> dict[str, float]:
    """The elements of each kind that a rank should hold.

    Args:
        full: number of parameters of the model.
    """
    # AdamW keeps two moments of each parameter.
    held: dict[str, float] = {"parameters": full, "gradients": full, "optimizer_state": 2 * full}
    for kind, first_stage in SHARDED_FROM.items():
        if stage >= first_stage:
            held[kind] /= ranks
    return held


def table(elements: Sequence[dict[str, int]], full: int, ranks: int, width: int) -> str:
    """The table, a line per stage: elements held and in theory, by kind; then megabytes of all of them.

    Args:
        elements: what the rank that holds most holds, by stage.
        full: number of parameters of the model.
        width: bytes of an element.
    """
    lines = [
        "                       parameters               gradients         optimizer state                 all, MB",
        "stage           local      theory       local      theory       local      theory       local      theory",
    ]
    for stage, local in enumerate(elements):
        expected = theory(stage, full, ranks)
        line = f"{stage} {TECHNIQUES[stage]:<7}"
        for kind in KINDS:
            line += f"{local[kind]:>12,}{expected[kind]:>12,.0f}"
        for counts in (local, expected):
            line += f"{sum(counts.values()) * width / 1e6:>12.2f}"
        lines.append(line)
    return "\n".join(lines)


def report_stages(run: Run, stages: Sequence[tuple[dict[str, int], list[float]]], model: nn.Module) -> bool:
    """Log and record what a rank holds under each stage.

    Args:
        stages: for each stage, the elements on the rank that holds most, and the losses.
        model: the model before it is sharded.

    Returns:
        Whether the losses of all stages are the same.
    """
    elements = [local for local, _ in stages]
    losses = [stage_losses for _, stage_losses in stages]
    full = parameter_count(model)
    text = table(elements, full, run.layout.dp, run.precision.storage.itemsize)
    run.log.info("numbers kept, on the rank that keeps most\n%s", text, stacklevel=2)
    run.describe(parameters=full, local=elements)
    return same_losses(run, losses)
