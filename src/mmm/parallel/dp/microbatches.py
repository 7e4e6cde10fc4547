"""A step's batch, split into micro-batches: gradients are summed over the ranks with the last of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from mmm.errors import ConfigError
from mmm.nn.init import class_name
from mmm.parallel.dp.wrapped import Wrapper
from mmm.torch_private.module import BatchNorm


def sync_gradients(model: nn.Module, now: bool) -> None:
    """Choose whether the next backward sums gradients over the ranks: True only at the last micro-batch of a step.

    This saves communication and costs memory: until then each rank keeps unsharded gradients of its own samples.

    Raises:
        ConfigError: the model has batch normalization, which has to see the global batch at once.
    """
    if not now:
        norms = batch_norms(model)
        if norms:
            name, norm = norms[0]
            raise ConfigError(f"micro-batches with {why_no_microbatches(name, norm)}")
    if isinstance(model, Wrapper):
        model.sync_gradients(now)
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def microbatches_of(batch: Any, count: int, modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Split a batch into micro-batches. The gradients of the modules are summed over dp with the last of them.

    Args:
        batch: has a method ``split(count)``.
        count: number of micro-batches.
        modules: the modules whose backward follows each micro-batch.
    """
    if count == 1:
        yield batch
        return
    modules = list(modules)
    for index, microbatch in enumerate(batch.split(count), start=1):
        for module in modules:
            sync_gradients(module, index == count)
        yield microbatch


def batch_norms(model: nn.Module) -> list[tuple[str, BatchNorm]]:
    """The modules that normalize by the statistics of the batch in their present mode, by name."""
    norms = []
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
            norms.append((name, module))
    return norms


def why_no_microbatches(name: str, norm: nn.Module, advice: str = "") -> str:
    """Why a BatchNorm takes no micro-batches, for an error.

    Args:
        advice: what else could be changed, in front of the usual advice.
    """
    return (
        f"{name}, a {class_name(norm)}: it normalizes by the statistics of the global batch, and a micro-batch does "
        f"not know those; {advice}use a norm of each sample (GroupNorm, LayerNorm), or call eval() on it, which takes "
        f"the statistics that it has"
    )
