"""Tied weights: one parameter under several names, such as the embedding and the output matrix of a GPT.

Functions that replace parameters untie them: ``parallelize_module`` and ``to_empty`` make a new one for each name, and
FSDP one for each of its units. So the names are noted before anything is applied, tied again after each such step, and
compared at the end: a tie is kept, or refused by its names. Stages of a pipeline cannot share a parameter: each has its
own, and `StageTies` keeps these equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm.nn.draw import canonical_name
from mmm.parallel.local import to_group_device, to_local
from mmm.parallel.mesh import Mesh

# The names of one parameter, in the order of the model.
Tie = tuple[str, ...]


def find_ties(model: nn.Module) -> list[Tie]:
    """The parameters of `model` that have several names."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
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
            if _placements(other) != _placements(first) or other.shape != first.shape:
                raise LayoutError(
                    f"{_tied(names)}, and {cause} makes of {names[0]} {_described(first)} and of {name} "
                    f"{_described(other)}: give both modules styles that leave the weight alike "
                    f"(RowwiseParallel of an Embedding and ColwiseParallel of a Linear both take rows), "
                    f"or untie them"
                )
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, first)


def check_tied(model: nn.Module, ties: Sequence[Tie], cause: str) -> None:
    """Raises LayoutError where the names of a tie have different parameters by now.

    Args:
        cause: what has replaced the parameters, for the message.
    """
    for names in ties:
        parameters = {id(model.get_parameter(name)) for name in names}
        if len(parameters) > 1:
            raise LayoutError(f"{_tied(names)}, and {cause} cannot keep them one: untie them")


def stage_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[dict[int, str]]:
    """The parameters of `model` that several stages of a pipeline have: for each, stage → its name there.

    Args:
        stages: the names of the modules in each stage.
    """
    ties = []
    for names in find_ties(model):
        by_stage: dict[int, str] = {}
        for name in names:
            stage_id = next(n for n, modules in enumerate(stages) if _is_inside(name, modules))
            by_stage.setdefault(stage_id, name)
        if len(by_stage) > 1:
            ties.append(by_stage)
    return ties


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a parameter of that name belongs to one of the modules, or to a module inside it."""
    return any(name.startswith(f"{module}.") for module in modules)


class StageTies:
    """Weights that several stages of a pipeline have, each as a parameter of its own.

    After each step their gradients are summed, in the order of the stages, so that an optimizer keeps the parameters
    equal, to the last bit.

    Attributes:
        repeated: this rank's parameters that an earlier stage, on whichever rank, has as well.
    """

    def __init__(
        self,
        ties: Sequence[Mapping[int, str]],
        modules: Mapping[int, nn.Module],
        coordinates: Mapping[int, int],
        mesh: Mesh,
    ) -> None:
        """A collective of the ranks of pp.

        Args:
            ties: what `stage_ties` returned.
            modules: this rank's stages by number, parallelized.
            coordinates: the coordinate of each stage on pp.
            mesh: a mesh with pp.

        Raises:
            LayoutError: the stages have other shards of a weight; on every rank.
        """
        self._group = mesh["pp"].get_group()
        self._coordinates = coordinates
        self._coordinate = mesh["pp"].get_local_rank()
        by_name = {}
        for stage_id, module in modules.items():
            by_name[stage_id] = {canonical_name(name): parameter for name, parameter in module.named_parameters()}
        # For each tie, its stages, and this rank's parameters by stage.
        self._ties: list[tuple[list[int], dict[int, nn.Parameter]]] = []
        self.repeated: list[nn.Parameter] = []
        shards = []
        for tie in ties:
            stages = sorted(tie)
            own = {stage_id: by_name[stage_id][name] for stage_id, name in tie.items() if stage_id in by_name}
            self._ties.append((stages, own))
            self.repeated += [parameter for stage_id, parameter in own.items() if stage_id != stages[0]]
            shards.append({stage_id: _described(parameter) for stage_id, parameter in own.items()})
        _check_alike(ties, mesh.gather("pp", shards))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of each tied weight over its stages. A collective of the pp ranks with such a weight."""
        for stages, own in self._ties:
            if own:
                self._sum(stages, own)

    def _sum(self, stages: Sequence[int], own: Mapping[int, nn.Parameter]) -> None:
        """Sum the gradients of one weight.

        Each rank sends its gradients to all others that have the weight, and adds up all of them in the order of the
        stages. An all-reduce would add them up in an order of its own, and would need a group for these ranks.

        Args:
            stages: all stages with the weight, in order.
            own: this rank's parameters, by stage.
        """
        gradients = {}
        for stage_id, parameter in own.items():
            if parameter.grad is not None:
                gradients[stage_id] = to_group_device(to_local(parameter.grad), self._group)
        peers = sorted({self._coordinates[stage_id] for stage_id in stages} - {self._coordinate})
        ops = []
        for stage_id in own:
            for peer in peers:
                ops.append(self._op(dist.isend, gradients[stage_id].contiguous(), peer))
        for stage_id in stages:
            if stage_id not in own:
                gradients[stage_id] = torch.empty_like(next(iter(gradients.values())))
                ops.append(self._op(dist.irecv, gradients[stage_id], self._coordinates[stage_id]))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        total = sum((gradients[stage_id] for stage_id in stages[1:]), gradients[stages[0]])
        for parameter in own.values():
            to_local(parameter.grad).copy_(total)  # type: ignore[arg-type]

    def _op(self, op: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, dist.get_global_rank(self._group, peer), self._group)


def _check_alike(ties: Sequence[Mapping[int, str]], by_rank: Sequence[Sequence[Mapping[int, str]]]) -> None:
    """Raises LayoutError where the stages of a tie have other shards of it.

    Args:
        by_rank: for each pp rank and each tie, how the parameter is sharded in each stage of that rank.
    """
    for tie_id, tie in enumerate(ties):
        by_stage: dict[int, str] = {}
        for rank_ties in by_rank:
            by_stage.update(rank_ties[tie_id])
        if len(set(by_stage.values())) > 1:
            shards = " and ".join(
                f"stage {stage_id} {tie[stage_id]} as {by_stage[stage_id]}" for stage_id in sorted(tie)
            )
            raise LayoutError(
                f"{_tied(tuple(tie.values()))}, and the pipeline has {shards}: give both modules styles that leave the "
                f"weight alike, or untie them",
                on_every_rank=True,
            )


def join_tied(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Join groups of modules that share a parameter: FSDP gathers each group as one.

    The joined group takes the place of the last of them. A group that shares a parameter with modules in no group goes
    with these, and is left out here.
    """
    # The highest number stands for the modules in no group.
    rest = len(groups)
    group_of_module = {id(module): group_id for group_id, group in enumerate(groups) for module in group}
    # Maps each group to the one that it is joined to.
    joined_to = list(range(rest + 1))
    for names in find_ties(model):
        together = {joined_to[_group_of(model, name, group_of_module, rest)] for name in names}
        last = max(together)
        for group_id, target in enumerate(joined_to):
            if target in together:
                joined_to[group_id] = last
    joined: list[list[nn.Module]] = []
    for target in range(rest):
        inside: set[int] = set()
        for group_id, group in enumerate(groups):
            if joined_to[group_id] == target:
                inside |= {id(module) for module in group}
        if inside:
            joined.append([module for module in model.modules() if id(module) in inside])
    return joined


def _group_of(model: nn.Module, name: str, group_of_module: Mapping[int, int], rest: int) -> int:
    """The group of the innermost module around a parameter that is in one; `rest` if none is."""
    path = name.rpartition(".")[0]
    while path:
        group_id = group_of_module.get(id(model.get_submodule(path)))
        if group_id is not None:
            return group_id
        path = path.rpartition(".")[0]
    return rest


def _tied(names: Tie) -> str:
    return f"{' and '.join(names)} are one tied weight"


def _placements(parameter: Tensor) -> object:
    """How a parameter is sharded, for comparison; None if it is plain."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, parameter.placements
    return None


def _described(parameter: Tensor) -> str:
    """How a parameter is sharded, for messages."""
    shape = "×".join(map(str, parameter.shape))
    if isinstance(parameter, DTensor):
        return f"{', '.join(map(str, parameter.placements))} of {shape}"
    return f"a plain {shape}"
