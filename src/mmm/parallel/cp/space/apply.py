"""Have an unedited model compute with this rank's rows of a field."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from mmm.parallel.cp.space.operators import style_of
from mmm.parallel.cp.space.split import Split, other_values
from mmm.parallel.plan import Field, find
from mmm.torch_private.module import own_buffers, own_parameters


def apply_space(model: nn.Module, field: Field, group: ProcessGroup) -> None:
    """Replace the forwards of the modules that have a style, in place.

    Args:
        model: the model, or a stage of it, on which `read_fields` has noted what its modules get.
        group: the ranks over which fields are split.
    """
    split = Split(group)
    for module in model.modules():
        style = style_of(module, field.styles)
        if style is not None:
            module.forward = partial(style, split, module, module.forward)
    for path, dim in field.parameters.items():
        owner, _, name = path.rpartition(".")
        # A stage of a pipeline may lack it.
        owners = find(model, owner) if owner else [model]
        for module in owners:
            compute_with_own_rows(module, name, dim, split)


def compute_with_own_rows(module: nn.Module, name: str, dim: int, split: Split) -> None:
    """Have the forward of a module find this rank's rows in place of a parameter or a buffer that is a field.

    Args:
        name: its name in the module.
        dim: the dim of its rows.
    """
    forward = module.forward

    @wraps(forward)
    def with_own_rows(*args: Any, **kwargs: Any) -> Any:
        tensors: Any = own_parameters(module)
        if name not in tensors:
            tensors = own_buffers(module)
        full = tensors.get(name)
        if full is None:
            return forward(*args, **kwargs)
        # Only for this forward: the optimizer and checkpoints have the full one.
        with other_values(tensors, {name: split.own(full, dim)}):
            return forward(*args, **kwargs)

    module.forward = with_own_rows  # type: ignore[method-assign]
