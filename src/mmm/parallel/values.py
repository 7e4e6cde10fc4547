"""The values that the constructor of a user's own model has given to parameters, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmm.errors import ConfigError
from mmm.nn.init import ShardBox, canonical_name, class_name
from mmm.nn.meta import kept_value, pop_value

Values = Callable[[str, ShardBox], Tensor | None]
"""Function of (canonical name, the shard that is local) that returns the shard, on any device and in any dtype. It
returns None for a buffer that keeps its values. It is called once for a tied weight, with its first name."""
# Tensors that a message names.
NAMED = 3


def check_parameters(model: nn.Module) -> None:
    """Raises ConfigError where one of PyTorch's lazy modules does not know its sizes yet, or gradients are sparse."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    lazy += [name for name, buffer in model.named_buffers() if is_lazy(buffer)]
    model_name = class_name(model)
    if lazy:
        names = names_in_message(lazy)
        raise ConfigError(f"{names} of {model_name} would get its shape from the first input: give sizes")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients, which no technique adds up: sparse=False")


def constructed_values(model: nn.Module) -> Values:
    """The values that the constructor of `model` gave to its parameters (`mmm.nn.meta`), each kept until it is read.

    Each rank reads its shards of what its own constructor has made, which has to be the same on every rank.

    Raises:
        ConfigError: parameters have no values.
    """
    owners = {name: _owner(model, name) for name, _ in model.named_parameters()}
    if not owners:
        return lambda name, box: None
    without_value = []
    for name, (module, own_name) in owners.items():
        if kept_value(module, own_name) is None:
            without_value.append(canonical_name(name))
    model_name = class_name(model)
    if len(without_value) == len(owners):
        raise ConfigError(
            f"{without_value[0]} and the other parameters of {model_name} have no values: build it on the CPU, inside "
            f"mmm.parallel.meta_parameters() or not; give it a method init_rule; or say where they come from, by "
            f'values=, or by init="by_name", which draws them from the seed and their names'
        )
    if without_value:
        raise ConfigError(
            f"parameter {without_value[0]} of {model_name} has no values, and others have: construct all of them on "
            f'the CPU, with their sizes; or say where values come from, by weights= or init="by_name"'
        )
    by_canonical_name = {canonical_name(name): owner for name, owner in owners.items()}

    def read(name: str, box: ShardBox) -> Tensor | None:
        if name not in by_canonical_name:
            return None
        module, own_name = by_canonical_name[name]
        full = pop_value(module, own_name)
        if full is None:
            return None
        return shard_of(full, box)

    return read


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and the parameter's name in it."""
    path, _, own_name = name.rpartition(".")
    return model.get_submodule(path), own_name


def shard_of(full: Tensor, box: ShardBox) -> Tensor:
    """The shard of a full tensor that a box describes; no copy."""
    slices = []
    for start, length in zip(box.start, box.length, strict=True):
        slices.append(slice(start, start + length))
    return full[tuple(slices)]


def names_in_message(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        text += f" (and {len(names) - NAMED} more)"
    return text
