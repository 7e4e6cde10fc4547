"""What a rank holds under each stage of ZeRO, with AdamW: measured, and beside it the theory.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mmm.examples._support.by_hand import most_of_ranks, same_losses
from mmm.nn.draw import parameter_count
from mmm.parallel.memory.measure import local_elements
from mmm.run.run import Run

KINDS = ("parameters", "gradients", "optimizer_state")
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer_state": 1}  # stage
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3")  # by stage


def most_elements(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Of each kind, the elements on the rank that holds most; to be called as `local_elements`. A collective."""
    local = local_elements(model, optimizer)
    return most_of_ranks({kind: local[kind] for kind in KINDS}, device)


def theory(stage: int, full: int, ranks: int) -> dict[str, float]:
    """What a rank holds of `full` parameters."""
    held: dict[str, float] = {"parameters": full, "gradients": full, "optimizer_state": 2 * full}
    for kind, first_stage in SHARDED_FROM.items():
        if stage >= first_stage:
            held[kind] /= ranks
    return held


def table(elements: Sequence[dict[str, int]], full: int, ranks: int, width: int) -> str:
    """A line a stage: the numbers held and in theory, by kind; then megabytes of all of them.

    Args:
        elements: held, by stage.
        full: parameters of the model.
        width: bytes of a number.
    """
    heads = [*(kind.replace("_", " ") for kind in KINDS), "all, MB"]
    lines = ["         " + "".join(f"{head:>24}" for head in heads), "stage    " + f"{'local':>12}{'theory':>12}" * 4]
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
    """Log and record what the stages held. Whether their losses are the same.

    Args:
        stages: of each, what the rank that holds most held, and the losses. model: unsharded.
    """
    elements, losses = zip(*stages, strict=True)
    full = parameter_count(model)
    text = table(elements, full, run.layout.dp, run.precision.storage.itemsize)
    run.log.info("numbers kept, on the rank that keeps most\n%s", text, stacklevel=2)
    run.describe(parameters=full, local=elements)
    return same_losses(run, losses)
