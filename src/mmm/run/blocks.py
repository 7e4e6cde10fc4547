"""The blocks of a model: the parts that have parameters, by which a run says where something began to differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from mmm.nn.draw import canonical_name
from mmm.parallel.dp.wrapped import unwrapped


def block_of(name: str) -> str:
    """The block that a parameter is in: "layers.0" of "layers.0.attention.weight". "" if no module of the model has it.

    A list counts as its elements.
    """
    *modules, _ = name.split(".")
    depth = 1
    # An element of a list: "layers.0".
    if len(modules) > 1 and modules[1].isdecimal():
        depth = 2
    return ".".join(modules[:depth])


def blocks_of(names: Iterable[str]) -> list[str]:
    """The blocks of a model, in the order of the names of its parameters."""
    # A dict keeps the order, and each block once.
    blocks = dict.fromkeys(map(block_of, names))
    # Parameters of the model itself are in no block.
    blocks.pop("", None)
    return list(blocks)


def modules_of(
    stages: Iterable[nn.Module],
    blocks: Sequence[str],
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks that this rank has, each with its module.

    Args:
        stages: this rank's modules.
        blocks: the blocks of the full model.
    """
    for stage in map(unwrapped, stages):
        # Reversed: of the modules with the same canonical name the outermost remains.
        modules = {}
        named_modules = list(stage.named_modules())
        for name, module in reversed(named_modules):
            modules[canonical_name(name)] = module
        for block in blocks:
            if block in modules:
                yield block, modules[block]
