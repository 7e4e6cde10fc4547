"""How much of a model a rank holds: what the ways of data parallelism differ in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.parallel.data.replicas import Replicas


def local_elements(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Numbers that this rank keeps in memory: ``parameters``, ``gradients`` and ``optimizer_state``.

    To be called between backward and ``zero_grad``, after a step (an optimizer makes its state in the first one).
    Counts memory, each piece once: with the rows that are added where ranks do not divide a tensor, and, where a part
    keeps a whole tensor alive, the whole. What is gathered or made for a moment only is not in it.
    """
    whole = model.module if isinstance(model, Replicas) else model
    parameters = list(whole.parameters())
    gradients = [p.grad for p in (*parameters, *model.parameters()) if p.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return {
        "parameters": _elements(parameters),
        "gradients": _elements(gradients),
        "optimizer_state": _elements(tensor for tensor in state if tensor.ndim),  # not the count of steps
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    pieces = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        memory = local.untyped_storage()
        pieces[memory.data_ptr()] = memory.nbytes() // local.element_size()
    return sum(pieces.values())
