"""A step's batch in micro-batches: gradients are summed over the ranks with the last of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from mmm.errors import ConfigError
from mmm.nn.draw import class_name
from mmm.parallel.dp.wrapped import Wrapper
from mmm.torch_private.module import BatchNorm


def sync_gradients(model: nn.Module, now: bool) -> None:
    """For several micro-batches a step: whether the next backward sums gradients over the ranks; True at the last.

    Saves communication and costs memory: until then each rank keeps unsharded gradients of its own samples.

    Raises:
        ConfigError: batch normalization, which has to see the global batch at once.
    """
    if not now and (norms := batch_norms(model)):
        raise ConfigError(f"micro-batches with {in_parts(*norms[0])}")
    if isinstance(model, Wrapper):
        model.sync_gradients(now)
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def microbatches_of(batch: Any, parts: int, modules: Iterable[nn.Module]) -> Iterator[Any]:
    """A batch in its parts. The gradients of the modules are summed over dp with the last part.

    Args:
        batch: has ``split(parts)``.
    """
    if parts == 1:
        yield batch
        return
    modules = list(modules)
    for index, microbatch in enumerate(batch.split(parts), start=1):
        for module in modules:
            sync_gradients(module, index == parts)
        yield microbatch


def batch_norms(model: nn.Module) -> list[tuple[str, BatchNorm]]:
    """The modules that normalize by the statistics of the batch, now."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm))
    return [(name, module) for name, module in named if module.training or module.running_mean is None]


def in_parts(name: str, norm: nn.Module, other: str = "") -> str:
    """Why a BatchNorm takes no micro-batches. Args: other: advice."""
    return (
        f"{name}, a {class_name(norm)}: it normalizes by the statistics of the global batch, and a micro-batch does "
        f"not know those; {other}use a norm of each sample (GroupNorm, LayerNorm), or call eval() on it, which takes "
        f"the statistics that it has"
    )
