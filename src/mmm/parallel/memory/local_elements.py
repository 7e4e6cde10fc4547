"""How much of a model is local to a rank, in which the data-parallel techniques differ."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mmm.parallel.dp.wrapped import unwrapped
from mmm.parallel.local import to_local
from mmm.torch_private.module import storage_id


def local_elements(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Elements that this rank has in memory: ``parameters``, ``gradients`` and ``optimizer_state``.

    To be called between backward and ``zero_grad``, after a step (an optimizer makes its state in the first one).
    Counts storage, each once: with padding where ranks do not divide a tensor, and in full where a view keeps it alive.
    Gathered parameters and temporaries are not counted.
    """
    inner = unwrapped(model)
    parameters = list(inner.parameters())
    gradients = [p.grad for p in (*parameters, *model.parameters()) if p.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return {
        "parameters": _elements(parameters),
        "gradients": _elements(gradients),
        "optimizer_state": _elements(tensor for tensor in state if tensor.ndim),  # not the count of steps
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    elements = {}
    for local in map(to_local, tensors):
        storage = local.untyped_storage()
        elements[storage_id(storage)] = storage.nbytes() // local.element_size()
    return sum(elements.values())
