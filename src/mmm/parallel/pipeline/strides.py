"""What one pipeline stage passes to the next, laid out in memory in the order of its dims.

A tensor of shape (2, 3, 4) lies so with strides (12, 4, 1). Convolutions give channels-last, transposes give anything,
and gloo sends neither; what a rank receives has the strides that it was told in the first step. ``contiguous()`` is not
enough: where a dim has size 1, PyTorch calls several strides contiguous, and operators go on from the one that is
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def in_order(tensor: Tensor) -> Tensor:
    """The same elements with the strides of a new tensor of that shape; copied only where it has others."""
    usual = torch.empty(tensor.shape, device="meta").stride()
    return tensor if tensor.stride() == usual else tensor.clone(memory_format=torch.contiguous_format)


class GradientInOrder(torch.autograd.Function):
    """The same tensor forward; backward, the gradient `in_order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return in_order(gradient)


def pass_in_order(stage: nn.Module, first: bool, last: bool) -> None:
    """Have a stage give activations in order to the next one, and gradients to the one before.

    Done by hooks on the module, so that it also holds where PyTorch tries out the shapes that pass.

    Args:
        first, last: whether it is the first or the last stage: images are not sent back, nor logits on.
    """

    def take(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(tree_map_only(Tensor, lambda x: GradientInOrder.apply(x) if x.requires_grad else x, list(given)))

    def give(module: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        # A backward that is split detaches in place what a stage gives, which PyTorch cannot do to a view.
        return tree_map_only(
            Tensor, lambda x: x.clone(memory_format=torch.contiguous_format) if x._is_view() else in_order(x), output
        )

    if not first:
        stage.register_forward_pre_hook(take)
    if not last:
        stage.register_forward_hook(give)
