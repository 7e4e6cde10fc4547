"""Build a model whose parameters have shapes alone, and whose buffers have their values.

On the meta device nothing has values: ``with torch.device("meta")`` makes a causal mask or a table of angles as empty
as the matrices, and nobody could tell afterwards what was in it. Parameters can be drawn later, from their names
(`mmm.models.weights`); buffers are what the model's constructor works out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, a parameter goes to the meta device as soon as a module has it; buffers stay, real, on the CPU.

    A parameter that is registered under two names stays one. What a constructor has put into a parameter before is
    lost: initial values come from the model's rules. A matrix exists for a moment, as memory that is reserved and never
    written, unless the constructor fills it before the module has it.
    """
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None  # as it is
        if parameter not in moved:
            with torch.no_grad():
                moved[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        return moved[parameter]

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return one
    try:
        yield
    finally:
        hook.remove()
