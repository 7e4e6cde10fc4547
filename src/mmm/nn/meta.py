"""Models whose parameters have only shapes, and whose buffers have their values.

``with torch.device("meta")`` also empties buffers, such as a causal mask or a table of angles, and their values cannot
be recovered. The values of parameters can: either those from the constructor are kept until each rank takes its shards,
or they are drawn from the parameters' names (`mmm.nn.init`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mmm.torch_private.module import own_parameters

# Maps a module to its parameters' values, by their names in it.
KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def meta_parameters(keep_values: bool = True) -> Iterator[None]:
    """Put the parameters of models that are constructed in this block on the meta device. Buffers keep their values, on
    the CPU. A parameter that is registered under two names stays one.

    Args:
        keep_values: True: the constructor runs as always, and the values that it has given to parameters are kept in
            the host's memory until the model is materialized. False: the values are lost. A parameter then moves when a
            module registers it. Its memory is reserved for a moment, and not written unless it is filled before.
    """
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    modules: list[nn.Module] = []

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # None leaves the parameter as it is.
        if keep_values:
            modules.append(module)
            return None
        if parameter is None or is_lazy(parameter):
            return None
        if parameter.is_meta and parameter.is_contiguous():
            return None
        if parameter not in moved:
            moved[parameter] = _on_meta(parameter)
        return moved[parameter]

    # PyTorch's annotation says None, but a hook may return a parameter.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
    _move(modules)


def keep_values(model: nn.Module) -> None:
    """Move the parameters of `model` that are not on the meta device there, in place, and keep their values."""
    _move(list(model.modules()))


def pop_value(module: nn.Module, name: str) -> Tensor | None:
    """The kept value of a module's parameter, which is then no longer kept. None if there is none."""
    return KEPT.get(module, {}).pop(name, None)


def kept_value(module: nn.Module, name: str) -> Tensor | None:
    """The kept value of a module's parameter; None if there is none."""
    return KEPT.get(module, {}).get(name)


def drop_values(model: nn.Module) -> None:
    """Free all values that are kept for `model`."""
    for module in model.modules():
        KEPT.pop(module, None)


def _move(modules: list[nn.Module]) -> None:
    """Move the parameters of these modules to the meta device, and keep their values."""
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    # Keeps all parameters alive to the end: a new one in the place of a freed one would have its id.
    originals: list[nn.Parameter | None] = []
    for module in modules:
        originals += own_parameters(module).values()
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is None or parameter.is_meta or is_lazy(parameter):
                continue
            # A tied parameter becomes one meta tensor.
            if parameter not in moved:
                moved[parameter] = _on_meta(parameter)
            KEPT.setdefault(module, {})[name] = parameter.detach()
            own_parameters(module)[name] = moved[parameter]
    del originals


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter without values. It is contiguous, as FSDP needs it: a transposed matrix that became a
    parameter is not."""
    empty = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format, requires_grad=False)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
