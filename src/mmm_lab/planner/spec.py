"""A model as the search sees it: the parts that a pipeline may split, their matrices, FLOPs and activations.

Parts that are alike, such as the layers of a Transformer, are one `PartKind`. `mmm_lab.planner.models` reads
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmm.models.definition import ModelDef
from mmm.parallel.plan import Plan, matches, sharded_dim
from mmm.parallel.pp.stages import Part, part_costs, parts_of


@dataclass(frozen=True)
class Matrix:
    """A parameter. dim: that tp shards, None for none. expert: whether ep shards it, along its first dim."""

    shape: tuple[int, ...]
    dim: int | None = None
    expert: bool = False

    def local(self, tp: int, ep: int) -> tuple[int, ...]:
        """Its shape on the rank that has most of it, before data parallelism shards it."""
        shape = list(self.shape)
        if self.expert:
            shape[0] //= ep
        elif self.dim is not None:
            shape[self.dim] = -(-shape[self.dim] // tp)
        return tuple(shape)


class Sizes(NamedTuple):
    """Elements of parameters on a rank.

    Attributes:
        local: as tp and ep leave them. padded: until their rows divide over the ranks that shard them; sharded: of
            these its own. tensors, units: how many parameters and FSDP units they are.
        last, largest, layer: padded, of the last part, the largest, and the largest but for the head.
    """

    local: int
    padded: int
    sharded: int
    tensors: int = 0
    units: int = 0
    last: int = 0
    largest: int = 0
    layer: int = 0


@dataclass(frozen=True, eq=False)
class PartKind:
    """Parts that are alike.

    Attributes:
        role: ``embedding``, ``layer`` or ``head``.
        matrices: in the order of the model. flops: of the forward of one sample. attention_flops: of these those of a
            causal score, of which a kernel computes half.
    """

    role: str
    matrices: tuple[Matrix, ...]
    flops: int
    attention_flops: int = 0

    @property
    def parameters(self) -> int:
        return sum(math.prod(matrix.shape) for matrix in self.matrices)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model.

    Attributes:
        name: as the command line gave it. definition: what the package knows of it. config: its sizes.
        kinds: of parts. sequence: the kind of each part, in the order of forward.
        tied: whether the head's matrix is the embedding's. tokens: of a sample. seq_length: 0 where there is none.
        program: module of the trainer that runs it. flags: of that program.
    """

    name: str
    definition: ModelDef
    plan: Plan
    config: Any
    kinds: tuple[PartKind, ...]
    sequence: tuple[int, ...]
    tied: bool
    tokens: int
    seq_length: int
    program: str
    flags: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Of the full model; a tied matrix counts once."""
        twice = max(math.prod(matrix.shape) for matrix in self.kinds[-1].matrices) if self.tied else 0
        return sum(self.kinds[kind].parameters for kind in self.sequence) - twice

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """FLOPs of each part, that stages are balanced by."""
        return tuple(self.kinds[kind].flops for kind in self.sequence)

    @property
    def offloads(self) -> bool:
        """Whether its program has a flag for offload."""
        return self.program == "mmm.trainer.lm"

    @property
    def flops(self) -> float:
        """Of forward and backward of one sample, all scores of attention counted, as in the trainer's mfu."""
        return 3.0 * sum(self.costs)

    @property
    def largest_part(self) -> PartKind:
        return max(self.kinds, key=lambda kind: kind.parameters)


def kinds_of(model: nn.Module, plan: Plan, sample: Tensor | None, scores: Mapping[str, int]) -> tuple[PartKind, ...]:
    """Embedding, layer and head of a model with one layer.

    Args:
        sample: None where FLOPs do not matter. scores: `PartKind.attention_flops`, by role.
    """
    parts = parts_of(model, plan)
    costs = [0] * len(parts) if sample is None else part_costs(model, parts, sample)
    return tuple(
        PartKind(role, matrices_of(model, plan, part), cost, scores.get(role, 0))
        for role, part, cost in zip(("embedding", "layer", "head"), parts, costs, strict=True)
    )


def matrices_of(model: nn.Module, plan: Plan, part: Part) -> tuple[Matrix, ...]:
    found = []
    for module in part:
        for own, parameter in model.get_submodule(module).named_parameters():
            name = f"{module}.{own}"
            path = name.rpartition(".")[0]
            expert = any(matches(f"{pattern}.experts", path) for pattern in plan.experts)
            dim = None if expert else sharded_dim(model, plan, name)
            found.append(Matrix(tuple(parameter.shape), dim, expert))
    return tuple(found)
