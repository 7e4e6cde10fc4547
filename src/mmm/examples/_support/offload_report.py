"""Where each way of the offload example keeps how many bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmm.examples._support.by_hand import most_of_ranks, same_losses
from mmm.parallel.local import to_local
from mmm.run.run import Run

PLACES = ("device", "host", "disk")


def bytes_by_place(way: str, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Count the bytes of parameters, gradients and optimizer state at each place. A collective of all ranks.

    Call it while there are gradients.

    Args:
        way: "device", "host" or "disk".

    Returns:
        For each place the bytes of the shards on the rank with most.
    """
    # With offload the host has the shards. The optimizer's state is there as well, unless it is on the disk.
    shards_at = "device"
    if way != "device":
        shards_at = "host"
    state_at = shards_at
    if way == "disk":
        state_at = "disk"

    local = dict.fromkeys(PLACES, 0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local[shards_at] += to_local(parameter).nbytes
            if parameter.grad is not None:
                local[shards_at] += to_local(parameter.grad).nbytes
            for value in optimizer.state[parameter].values():
                # AdamW's step is a scalar and does not count.
                if isinstance(value, Tensor) and value.ndim > 0:
                    local[state_at] += to_local(value).nbytes
    return most_of_ranks(local, device)


def report(run: Run, ways: Mapping[str, tuple[dict[str, int], list[float]]]) -> bool:
    """Log and record what each way holds at each place.

    Args:
        ways: for each way its bytes by place, and its losses.

    Returns:
        Whether the losses of every way are those of the first.
    """
    lines = ["shards, MB   on the device     on the host     on the disk            loss"]
    bytes_of_ways = {}
    losses_of_ways = []
    for way, (places, losses) in ways.items():
        line = f"{way:10}"
        for place in PLACES:
            line += f"{places[place] / 1e6:16.2f}"
        lines.append(f"{line}{losses[-1]:16.9f}")
        bytes_of_ways[way] = places
        losses_of_ways.append(losses)
    run.log.info("what the rank with most holds\n%s", "\n".join(lines), stacklevel=2)
    run.describe(bytes_by_place=bytes_of_ways)
    return same_losses(run, losses_of_ways)
