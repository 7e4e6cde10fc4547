"""Memory and initial weights for a model that has been parallelized on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mmm.errors import ConfigError
from mmm.models import weights
from mmm.parallel.data.fsdp import is_offloaded
from mmm.parallel.data.replicas import Replicas
from mmm.parallel.local import local_box, to_local
from mmm.parallel.ties import find_ties, tie_again


def check_weights(model: nn.Module) -> None:
    """Raises ConfigError where a parameter, or a buffer without values, has no rule; needs no process group."""
    if wrong := weights.parameter_problems(model) + weights.buffer_problems(model):
        raise ConfigError("; ".join(wrong))


def materialize(model: nn.Module, device: torch.device, seed: int, rules: weights.InitRules | None = None) -> None:
    """Give a model memory on `device` and its initial weights; each rank draws its own shards. Buffers keep their
    values. A collective for ddp, zero1 and zero2, whose ranks connect here: what they send must have memory first.

    Args:
        rules: as for `weights.initialize`.

    Raises:
        ConfigError: as `check_weights`.
    """
    inner = model.module if isinstance(model, Replicas) else model
    check_weights(inner)
    buffers, ties = dict(inner.named_buffers(remove_duplicate=False)), find_ties(inner)
    inner.to_empty(device="cpu" if is_offloaded(inner) else device)
    tie_again(inner, ties, "its memory")
    _restore_buffers(inner, buffers, device)
    empty = {name for name, buffer in buffers.items() if buffer.is_meta}
    weights.initialize(inner, seed, box_of=local_box, local_of=to_local, empty=empty, device=device, rules=rules)
    if isinstance(model, Replicas):
        model.connect()


def _restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor], device: torch.device) -> None:
    """Put buffers on the compute device (also with offload, which moves parameters alone): with their values, or empty
    where they had none. What several modules share stays shared."""
    moved = {
        id(buffer): torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        for buffer in buffers.values()
    }
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = moved[id(buffer)]
