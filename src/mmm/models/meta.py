"""Build a model whose parameters have shapes alone, and whose buffers have their values.

``with torch.device("meta")`` also empties buffers, such as a causal mask or a table of angles, and their values cannot
be recovered. Parameters can: they are drawn later from their names (`mmm.models.weights`).
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
    """Inside, a parameter moves to the meta device when a module registers it; buffers stay on the CPU with values.

    A parameter that is registered under two names stays one. Values that a constructor gave a parameter are lost. Its
    memory is reserved for a moment, and not written unless the constructor fills it before it is registered.
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
