"""Tied weights: one parameter under several names, such as the embedding and the output matrix of a GPT.

Functions that replace parameters untie them: ``parallelize_module`` and ``to_empty`` make a new one for each name, and
FSDP one for each of its units. So the names are noted before anything is applied, tied again after each such step, and
compared at the end: a tie is kept, or refused by its names.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError

Tie = tuple[str, ...]  # the names of one parameter, in the order of the model


def find_ties(model: nn.Module) -> list[Tie]:
    """The parameters of `model` that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(some) for some in names.values() if len(some) > 1]


def tie_again(model: nn.Module, ties: Sequence[Tie], what: str) -> None:
    """Give all names of each tie the parameter of the first.

    Args:
        what: has replaced them, for the message.

    Raises:
        LayoutError: their placements differ, so that they cannot be one.
    """
    for names in ties:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            other = model.get_parameter(name)
            if _placements(other) != _placements(first) or other.shape != first.shape:
                raise LayoutError(
                    f"{_tied(names)}, and {what} makes of {names[0]} {_described(first)} and of {name} "
                    f"{_described(other)}: give both modules styles that leave the weight alike "
                    f"(RowwiseParallel of an Embedding and ColwiseParallel of a Linear both take rows), "
                    f"or untie them"
                )
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, first)


def check_tied(model: nn.Module, ties: Sequence[Tie], what: str) -> None:
    """Raises LayoutError where names of a tie have different parameters by now."""
    for names in ties:
        if len({id(model.get_parameter(name)) for name in names}) > 1:
            raise LayoutError(f"{_tied(names)}, and {what} cannot keep them one: untie them")


def check_stage_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Whether no tie spans pipeline stages; needs no process group.

    Args:
        stages: the modules of each.

    Raises:
        LayoutError: one does: each stage would update a weight of its own.
    """
    for names in find_ties(model):
        at = [
            next(
                (
                    number
                    for number, modules in enumerate(stages)
                    if any(name == module or name.startswith(f"{module}.") for module in modules)
                ),
                None,
            )
            for name in names
        ]
        if len(set(at)) > 1:
            raise LayoutError(
                f"{_tied(names)}, and the pipeline has them in stages {' and '.join(map(str, at))}, on "
                f"other ranks: use pp 1, or untie them"
            )


def join_tied(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Groups of modules that FSDP gathers as one, joined where they share a parameter.

    They take the place of the last of them. A group that shares one with what is in no group goes with the rest, and is
    left out here.
    """
    number = {id(module): i for i, group in enumerate(groups) for module in group}
    rest = len(groups)  # stands for the modules in no group
    joined_to = list(range(rest + 1))

    def group_of(name: str) -> int:
        path = name.rpartition(".")[0]
        while path and id(model.get_submodule(path)) not in number:
            path = path.rpartition(".")[0]
        return number[id(model.get_submodule(path))] if path else rest

    for names in find_ties(model):
        together = {joined_to[group_of(name)] for name in names}
        joined_to = [max(together) if into in together else into for into in joined_to]  # the rest is the highest
    order = {id(module): i for i, module in enumerate(model.modules())}
    joined: dict[int, list[nn.Module]] = {}
    for group, into in zip(groups, joined_to, strict=False):
        if into != rest:
            joined.setdefault(into, []).extend(group)
    return [sorted(group, key=lambda module: order[id(module)]) for _, group in sorted(joined.items())]


def _tied(names: Tie) -> str:
    return f"{' and '.join(names)} are one tied weight"


def _placements(parameter: Tensor) -> object:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _described(parameter: Tensor) -> str:
    shape = "×".join(map(str, parameter.shape))
    return (
        f"{', '.join(map(str, parameter.placements))} of {shape}"
        if isinstance(parameter, DTensor)
        else (f"a plain {shape}")
    )
