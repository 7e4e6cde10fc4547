"""The values that the constructor of a user's own model has made, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mmm.errors import ConfigError
from mmm.nn.draw import ShardBox, canonical_name, class_name
from mmm.nn.meta import kept_value, pop_value

Values = Callable[[str, ShardBox], Tensor | None]
"""(canonical name, the shard that is local) → the shard, on any device and in any dtype; None for a buffer that keeps
what it has. A tied weight is asked for once, under its first name."""
NAMED = 3  # tensors that a message names


def check_parameters(model: nn.Module) -> None:
    """Raises ConfigError where a module of PyTorch's lazy ones does not know its sizes yet, or gradients are sparse."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"{names_in_message(lazy)} of {class_name(model)} would get its shape from the first input: give sizes"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} has sparse gradients, which no technique adds up: sparse=False")


def constructed_values(model: nn.Module) -> Values:
    """What the constructor of `model` has put into its parameters (`mmm.nn.meta`), each kept until it is asked for.

    Each rank reads its own shards of what its own constructor has made: every rank has to make the same.

    Raises:
        ConfigError: parameters have no values.
    """
    owners = {name: _owner(model, name) for name, _ in model.named_parameters()}
    if not owners:
        return lambda name, box: None
    lacking = [name for name, owner in owners.items() if kept_value(*owner) is None]
    if len(lacking) == len(owners):
        raise ConfigError(
            f"{canonical_name(lacking[0])} and the other parameters of {class_name(model)} have no values: build it on "
            f"the CPU, inside mmm.parallel.meta_parameters() or not; give it a method init_rule; or say where they "
            f'come from, by values=, or by init="by_name", which draws them from the seed and their names'
        )
    if lacking:
        raise ConfigError(
            f"parameter {canonical_name(lacking[0])} of {class_name(model)} has no values, and others have: construct "
            f'all of them on the CPU, with their sizes; or say where values come from, by weights= or init="by_name"'
        )
    by_name = {canonical_name(name): owner for name, owner in owners.items()}

    def read(name: str, box: ShardBox) -> Tensor | None:
        full = pop_value(*by_name[name]) if name in by_name else None
        return None if full is None else shard_of(full, box)

    return read


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def shard_of(full: Tensor, box: ShardBox) -> Tensor:
    return full[tuple(slice(start, start + length) for start, length in zip(box.start, box.length, strict=True))]


def names_in_message(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" (and {len(names) - NAMED} more)" if len(names) > NAMED else "")
