"""Tied weights: one parameter under several names, such as the embedding and the output matrix of a GPT.

Functions that replace parameters untie them: ``parallelize_module`` and ``to_empty`` make a new one for each name, and
FSDP one for each of its units. So the names are noted before anything is applied, tied again after each such step, and
compared at the end: a tie is kept, or refused by its names. Stages of a pipeline cannot share a parameter: see
`mmm.parallel.pp.ties`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError

# The names of one parameter, in the order of the model.
Tie = tuple[str, ...]


def find_ties(model: nn.Module) -> list[Tie]:
    """The parameters of `model` that have several names."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = names_of.setdefault(id(parameter), [])
        names.append(name)
    return [tuple(names) for names in names_of.values() if len(names) > 1]


def retie(model: nn.Module, ties: Sequence[Tie], cause: str) -> None:
    """Give all names of each tie the parameter of the first name.

    Args:
        cause: what has replaced the parameters, for the message.

    Raises:
        LayoutError: their placements differ, so that they cannot be one.
    """
    for names in ties:
        first = model.get_parameter(names[0])
        for name in names[1:]:
            other = model.get_parameter(name)
            same_placements = _placements(other) == _placements(first)
            if not same_placements or other.shape != first.shape:
                first_text = described(first)
                other_text = described(other)
                raise LayoutError(
                    f"{tied_text(names)}, and {cause} makes "
                    f"of {names[0]} {first_text} and of {name} {other_text}: give "
                    f"both modules styles that leave the weight alike (RowwiseParallel of an Embedding and "
                    f"ColwiseParallel of a Linear both take rows), or untie them"
                )
            path, _, own_name = name.rpartition(".")
            owner = model.get_submodule(path)
            setattr(owner, own_name, first)


def check_tied(model: nn.Module, ties: Sequence[Tie], cause: str) -> None:
    """Raises LayoutError where the names of a tie have different parameters by now.

    Args:
        cause: what has replaced the parameters, for the message.
    """
    for names in ties:
        parameters = {id(model.get_parameter(name)) for name in names}
        if len(parameters) > 1:
            raise LayoutError(f"{tied_text(names)}, and {cause} cannot keep them one: untie them")


def join_tied(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Join groups of modules that share a parameter: FSDP gathers each group as one.

    The joined group takes the place of the last of them. A group that shares a parameter with modules in no group goes
    with these, and is left out here.
    """
    joined = [list(group) for group in groups]
    for names in find_ties(model):
        group_ids = {_group_of(model, name, joined) for name in names}
        numbered = sorted(group_id for group_id in group_ids if group_id is not None)
        together: list[nn.Module] = []
        for group_id in numbered:
            together += joined[group_id]
            joined[group_id] = []
        if None not in group_ids:
            joined[numbered[-1]] = together
    in_order = []
    for group in joined:
        inside = {id(module) for module in group}
        if inside:
            in_order.append([module for module in model.modules() if id(module) in inside])
    return in_order


def _group_of(model: nn.Module, name: str, groups: Sequence[Sequence[nn.Module]]) -> int | None:
    """The group of the innermost module around a parameter that is in one; None if none is."""
    path = name.rpartition(".")[0]
    while path:
        module = model.get_submodule(path)
        for group_id, group in enumerate(groups):
            if any(module is other for other in group):
                return group_id
        path = path.rpartition(".")[0]
    return None


def tied_text(names: Tie) -> str:
    return f"{' and '.join(names)} are one tied weight"


def _placements(parameter: Tensor) -> object:
    """How a parameter is sharded, for comparison; None if it is plain."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    return None


def described(parameter: Tensor) -> str:
    """How a parameter is sharded, for messages."""
    shape = "×".join(map(str, parameter.shape))
    if isinstance(parameter, DTensor):
        placements = ", ".join(map(str, parameter.placements))
        return f"{placements} of {shape}"
    return f"a plain {shape}"
