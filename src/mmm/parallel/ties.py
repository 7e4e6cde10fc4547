"""Tied weights: one parameter under several names, such as the embedding and the output matrix of a GPT.

Functions that replace parameters untie them: ``parallelize_module`` and ``to_empty`` make a new one for each name, and
FSDP one for each of its units. So the names are noted before anything is applied, tied again after each such step, and
compared at the end: a tie is kept, or refused by its names. Stages of a pipeline cannot share a parameter: each has its
own, and they are kept equal (`StageTies`).
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

Tie = tuple[str, ...]  # the names of one parameter, in the order of the model


def find_ties(model: nn.Module) -> list[Tie]:
    """The parameters of `model` that have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(some) for some in names.values() if len(some) > 1]


def retie(model: nn.Module, ties: Sequence[Tie], what: str) -> None:
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


def stage_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[dict[int, str]]:
    """The parameters of `model` that several stages of a pipeline have: stage → the name there.

    Args:
        stages: the modules of each.
    """
    ties = []
    for names in find_ties(model):
        by_stage: dict[int, str] = {}
        for name in names:
            inside = (n for n, modules in enumerate(stages) if any(name.startswith(f"{module}.") for module in modules))
            by_stage.setdefault(next(inside), name)
        ties.append(by_stage)
    return [by_stage for by_stage in ties if len(by_stage) > 1]


class StageTies:
    """Weights that several stages of a pipeline have, each a parameter of its own. After each step their gradients are
    summed, in the order of the stages: so an optimizer keeps them equal, to the last bit.

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
        """A collective over pp.

        Args:
            ties: of `stage_ties`. modules: this rank's stages by number, parallelized. coordinates: of each stage on
                pp.

        Raises:
            LayoutError: the stages have other shards of a weight; on every rank.
        """
        self._group = mesh["pp"].get_group()
        self._coordinates = coordinates
        self._coordinate = mesh["pp"].get_local_rank()
        named = {n: {canonical_name(name): p for name, p in module.named_parameters()} for n, module in modules.items()}
        # Of each tie: its stages, and this rank's parameters by stage.
        self._ties: list[tuple[list[int], dict[int, nn.Parameter]]] = []
        for tie in ties:
            self._ties.append((sorted(tie), {n: named[n][name] for n, name in tie.items() if n in named}))
        self.repeated = [p for stages, own in self._ties for n, p in own.items() if n != stages[0]]
        shards = [{n: _described(p) for n, p in own.items()} for _, own in self._ties]
        _check_alike(ties, mesh.gather("pp", shards))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """A collective of the ranks that have such a weight."""
        for stages, own in self._ties:
            if own:
                self._sum(stages, own)

    def _sum(self, stages: Sequence[int], own: Mapping[int, nn.Parameter]) -> None:
        gradients = {n: to_group_device(to_local(p.grad), self._group) for n, p in own.items() if p.grad is not None}
        peers = sorted({self._coordinates[n] for n in stages} - {self._coordinate})
        ops = [self._op(dist.isend, gradients[n].contiguous(), peer) for n in own for peer in peers]
        for n in stages:
            if n not in own:
                gradients[n] = torch.empty_like(next(iter(gradients.values())))
                ops.append(self._op(dist.irecv, gradients[n], self._coordinates[n]))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        total = sum((gradients[n] for n in stages[1:]), gradients[stages[0]])
        for parameter in own.values():
            to_local(parameter.grad).copy_(total)  # type: ignore[arg-type]

    def _op(self, op: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, dist.get_global_rank(self._group, peer), self._group)


def _check_alike(ties: Sequence[Mapping[int, str]], by_rank: Sequence[Sequence[Mapping[int, str]]]) -> None:
    """Raises LayoutError where the stages of a tie have other shards of it.

    Args:
        by_rank: of each pp rank, of each tie: by stage, how the parameter is sharded there.
    """
    for tie_id, tie in enumerate(ties):
        by_stage = {n: text for of_rank in by_rank for n, text in of_rank[tie_id].items()}
        if len(set(by_stage.values())) > 1:
            have = " and ".join(f"stage {n} {tie[n]} as {by_stage[n]}" for n in sorted(tie))
            raise LayoutError(
                f"{_tied(tuple(tie.values()))}, and the pipeline has {have}: give both modules styles that leave the "
                f"weight alike, or untie them",
                on_every_rank=True,
            )


def join_tied(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> list[list[nn.Module]]:
    """Groups of modules that FSDP gathers as one, joined where they share a parameter.

    They take the place of the last of them. A group that shares one with what is in no group goes with the rest, and is
    left out here.
    """
    rest = len(groups)  # stands for the modules in no group
    group_of_module = {id(module): number for number, group in enumerate(groups) for module in group}
    joined_to = list(range(rest + 1))
    for names in find_ties(model):
        together = {joined_to[_group_of(model, name, group_of_module, rest)] for name in names}
        joined_to = [max(together) if into in together else into for into in joined_to]  # the rest is the highest
    joined: list[list[nn.Module]] = []
    for into in range(rest):
        inside = {id(module) for number, group in enumerate(groups) if joined_to[number] == into for module in group}
        if inside:
            joined.append([module for module in model.modules() if id(module) in inside])
    return joined


def _group_of(model: nn.Module, name: str, group_of_module: Mapping[int, int], rest: int) -> int:
    """The group of the innermost module around a parameter that has one."""
    path = name.rpartition(".")[0]
    while path:
        group = group_of_module.get(id(model.get_submodule(path)))
        if group is not None:
            return group
        path = path.rpartition(".")[0]
    return rest


def _tied(names: Tie) -> str:
    return f"{' and '.join(names)} are one tied weight"


def _placements(parameter: Tensor) -> object:
    return (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None


def _described(parameter: Tensor) -> str:
    shape = "×".join(map(str, parameter.shape))
    if isinstance(parameter, DTensor):
        return f"{', '.join(map(str, parameter.placements))} of {shape}"
    return f"a plain {shape}"
