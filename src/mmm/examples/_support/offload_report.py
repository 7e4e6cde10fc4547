"""What each way of the offload example holds where."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmm.examples._support.by_hand import most_of_ranks, same_losses
from mmm.parallel.local import to_local
from mmm.run.run import Run

PLACES = ("device", "host", "disk")


def bytes_by_place(way: str, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Bytes of shards of parameters, gradients and state at each place, on the rank with most. A collective.

    It is called while there are gradients.
    """
    updated_on = "device" if way == "device" else "host"
    local = dict.fromkeys(PLACES, 0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local[updated_on] += to_local(parameter).nbytes
            if parameter.grad is not None:
                local[updated_on] += to_local(parameter.grad).nbytes
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor) and value.ndim > 0:
                    local["disk" if way == "disk" else updated_on] += to_local(value).nbytes
    return most_of_ranks(local, device)


def report(run: Run, ways: Mapping[str, tuple[dict[str, int], list[float]]]) -> bool:
    """Log and record what each way holds at each place. Whether its losses are those of the first way."""
    lines = ["shards, MB" + "".join(f"{'on the ' + place:>16}" for place in PLACES) + f"{'loss':>16}"]
    for way, (places, losses) in ways.items():
        sizes = "".join(f"{places[place] / 1e6:16.2f}" for place in PLACES)
        lines.append(f"{way:10}{sizes}{losses[-1]:16.9f}")
    run.log.info("what the rank with most holds\n%s", "\n".join(lines), stacklevel=2)
    run.describe(bytes_by_place={way: places for way, (places, _) in ways.items()})
    return same_losses(run, [losses for _, losses in ways.values()])
