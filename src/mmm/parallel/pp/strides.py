"""Contiguous tensors between pipeline stages: shape (2, 3, 4) has strides (12, 4, 1).

Convolutions return channels-last, transposes any strides, and gloo sends neither; a receive buffer has the strides that
the first step inferred. ``contiguous()`` is not enough: where a dim has size 1, PyTorch calls several strides
contiguous, and keeps the one that is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmm.torch_private.module import is_view
from mmm.torch_private.operators import tree_map_only


def to_contiguous(tensor: Tensor) -> Tensor:
    """The same elements with the strides of a new tensor of that shape; copied only where it has others."""
    expected = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == expected else tensor.clone(memory_format=torch.contiguous_format)


class ContiguousGradient(torch.autograd.Function):
    """The identity in forward; in backward, the gradient `to_contiguous`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return to_contiguous(gradient)


def contiguous_between_stages(stage: nn.Module, first: bool, last: bool) -> None:
    """Make contiguous what a stage sends: activations to the next one, and gradients to the one before.

    Hooks on the module do it, so that it also holds where PyTorch infers the shapes.

    Args:
        first, last: whether it is the first or the last stage: inputs have no gradients to send, and logits stay.
    """

    def wrap(x: Tensor) -> Tensor:
        return ContiguousGradient.apply(x) if x.requires_grad else x

    def copy(x: Tensor) -> Tensor:
        # A backward that is split detaches a stage's output in place, which PyTorch cannot do to a view.
        return x.clone(memory_format=torch.contiguous_format) if is_view(x) else to_contiguous(x)

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tree_map_only(Tensor, wrap, list(args)))

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, copy, output)

    if not first:
        stage.register_forward_pre_hook(before)
    if not last:
        stage.register_forward_hook(after)
