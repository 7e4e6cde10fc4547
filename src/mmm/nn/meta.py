"""Models whose parameters have shapes alone, and whose buffers have their values.

``with torch.device("meta")`` also empties buffers, such as a causal mask or a table of angles, and their values cannot
be recovered. Those of parameters can: what the constructor made of them is kept until each rank takes its shards, or
they are drawn from their names (`mmm.nn.draw`).
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

KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()  # module → its parameters' values, by their names in it


@contextmanager
def meta_parameters(keep_values: bool = True) -> Iterator[None]:
    """What is constructed inside has its parameters on the meta device afterwards; buffers stay on the CPU with values.

    A parameter that is registered under two names stays one.

    Args:
        keep_values: the constructor runs as always, and the values that it has given to parameters are kept in the
            host's memory until the model is materialized. False: they are lost. A parameter then moves when a module
            registers it, and its memory is reserved for a moment, and not written unless it is filled before.
    """
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    modules: list[nn.Module] = []

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if keep_values:
            modules.append(module)
            return None  # as it is
        if parameter is None or is_lazy(parameter) or (parameter.is_meta and parameter.is_contiguous()):
            return None
        if parameter not in moved:
            moved[parameter] = _on_meta(parameter)
        return moved[parameter]

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return one
    try:
        yield
    finally:
        hook.remove()
    _move(modules)


def keep_values(model: nn.Module) -> None:
    """Move the parameters of `model` that are not on the meta device there, in place, and keep their values."""
    _move(list(model.modules()))


def pop_value(module: nn.Module, name: str) -> Tensor | None:
    """The kept value of a module's parameter, which is then kept no more."""
    return KEPT.get(module, {}).pop(name, None)


def kept_value(module: nn.Module, name: str) -> Tensor | None:
    return KEPT.get(module, {}).get(name)


def drop_values(model: nn.Module) -> None:
    """Keep no values of `model` any more."""
    for module in model.modules():
        KEPT.pop(module, None)


def _move(modules: list[nn.Module]) -> None:
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
    # None is freed, and its place taken.
    originals = [p for module in modules for p in own_parameters(module).values()]
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is None or parameter.is_meta or is_lazy(parameter):
                continue
            if parameter not in moved:
                moved[parameter] = _on_meta(parameter)
            KEPT.setdefault(module, {})[name] = parameter.detach()
            own_parameters(module)[name] = moved[parameter]
    del originals


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Contiguous, as FSDP needs it: a transposed matrix that became a parameter is not."""
    empty = torch.empty_like(parameter, device="meta", memory_format=torch.contiguous_format, requires_grad=False)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
