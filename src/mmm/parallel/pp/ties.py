"""Weights that several stages of a pipeline have: each stage has a parameter of its own, and all are kept equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmm.errors import LayoutError
from mmm.nn.init import canonical_name
from mmm.parallel.local import to_group_device, to_local
from mmm.parallel.mesh import Mesh
from mmm.parallel.ties import described, find_ties, tied_text

# The stages of a pipeline that have one parameter, and its name in each.
StageTie = dict[int, str]
# The stages of this rank that have one parameter, and the parameter of each.
StageParameters = dict[int, nn.Parameter]


def stage_ties(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[StageTie]:
    """The parameters of `model` that several stages of a pipeline have.

    Args:
        stages: the names of the modules in each stage.

    Raises:
        LayoutError: a name of a tied parameter is in no stage. A stage would keep it as a weight of its own.
    """
    ties = []
    for names in find_ties(model):
        by_stage: StageTie = {}
        for name in names:
            for stage_id, modules in enumerate(stages):
                if _is_inside(name, modules):
                    by_stage.setdefault(stage_id, name)
                    break
            else:
                raise LayoutError(
                    f"{tied_text(names)}, and the plan of this model puts {name} into no pipeline stage: name its "
                    f"module in its stages, or untie them"
                )
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
        ties: Sequence[StageTie],
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
            parameters = {}
            for name, parameter in module.named_parameters():
                parameters[canonical_name(name)] = parameter
            by_name[stage_id] = parameters
        # For each tie, its stages, and this rank's parameters by stage.
        self._ties: list[tuple[list[int], StageParameters]] = []
        self.repeated: list[nn.Parameter] = []
        shards = []
        for tie in ties:
            stages = sorted(tie)
            own: StageParameters = {}
            for stage_id, name in tie.items():
                if stage_id not in by_name:
                    continue
                parameter = by_name[stage_id][name]
                own[stage_id] = parameter
                if stage_id != stages[0]:
                    self.repeated.append(parameter)
            self._ties.append((stages, own))
            shards.append({stage_id: described(parameter) for stage_id, parameter in own.items()})
        # Every rank of pp compares the shards of all of them, and refuses the same.
        by_rank = mesh.gather("pp", shards)
        _check_alike(ties, by_rank)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of each tied weight over its stages. A collective of the pp ranks with such a weight."""
        for stages, own in self._ties:
            # A frozen weight has no gradient, in any stage.
            is_trained = any(parameter.requires_grad for parameter in own.values())
            if is_trained:
                self._sum(stages, own)

    def _sum(self, stages: Sequence[int], own: StageParameters) -> None:
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
                local = to_local(parameter.grad)
                gradients[stage_id] = to_group_device(local, self._group)
        all_ranks = {self._coordinates[stage_id] for stage_id in stages}
        peers = sorted(all_ranks - {self._coordinate})
        ops = []
        for stage_id in own:
            gradient = gradients[stage_id].contiguous()
            for peer in peers:
                ops.append(self._op(dist.isend, gradient, peer))
        for stage_id in stages:
            if stage_id not in own:
                any_gradient = next(iter(gradients.values()))
                received = torch.empty_like(any_gradient)
                gradients[stage_id] = received
                peer = self._coordinates[stage_id]
                ops.append(self._op(dist.irecv, received, peer))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        first_stage, *other_stages = stages
        total = gradients[first_stage]
        for stage_id in other_stages:
            total = total + gradients[stage_id]
        for parameter in own.values():
            to_local(parameter.grad).copy_(total)  # type: ignore[arg-type]

    def _op(self, op: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        """A send to, or a receive from, a coordinate on pp."""
        rank = dist.get_global_rank(self._group, peer)
        return dist.P2POp(op, tensor, rank, self._group)


def _check_alike(
    ties: Sequence[StageTie],
    by_rank: Sequence[Sequence[Mapping[int, str]]],
) -> None:
    """Raises LayoutError where the stages of a tie have other shards of it.

    Args:
        by_rank: for each pp rank and each tie, how the parameter is sharded in each stage of that rank.
    """
    for tie_id, tie in enumerate(ties):
        by_stage: dict[int, str] = {}
        for rank_ties in by_rank:
            by_stage.update(rank_ties[tie_id])
        if len(set(by_stage.values())) > 1:
            shards = []
            for stage_id in sorted(tie):
                name = tie[stage_id]
                shards.append(f"stage {stage_id} {name} as {by_stage[stage_id]}")
            names = tuple(tie.values())
            pipeline = " and ".join(shards)
            raise LayoutError(
                f"{tied_text(names)}, and the pipeline has {pipeline}: give both modules styles that leave the weight "
                f"alike, or untie them",
                on_every_rank=True,
            )
