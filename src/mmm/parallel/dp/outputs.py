"""What leaves a model, of any structure, and what reaches it in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from mmm.torch_private.autograd import will_run


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a value of any structure: a tensor, containers of them, objects that have them as attributes."""
    values, seen = [value], set[int]()
    while values:
        value = values.pop()
        if id(value) in seen or isinstance(value, str | nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list | tuple | set):
            values += value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            values += vars(value).values()


def adds_to_leaves(node: Node) -> bool:
    """In a backward that has reached `node`: whether it adds to ``.grad`` below it, as ``backward`` does and
    ``torch.autograd.grad`` does not."""
    nodes, seen = [node], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            try:
                return will_run(node)
            except RuntimeError:  # the gradient of this leaf is what autograd.grad was asked for
                return False
        nodes += [below for below, _ in node.next_functions if below is not None]
    return False
