"""A model as the search sees it: the parts that a pipeline may split, their matrices, FLOPs and activations.

Parts that are alike, such as the layers of a Transformer, share one `PartKind`. `mmm_lab.planner.models` reads all of
this from a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmm.models.definition import ModelDef
from mmm.parallel.plan import Plan, matches, sharded_dim
from mmm.parallel.pp.stages import Part, part_costs, parts_of


@dataclass(frozen=True)
class Matrix:
    """A parameter.

    Attributes:
        dim: the dim that tp shards; None if it shards none.
        expert: whether it belongs to experts. Its first dim is then the expert, which ep shards.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    expert: bool = False

    def local(self, tp: int, ep: int) -> tuple[int, ...]:
        """Its shape on the rank that has most of it, before data parallelism shards it."""
        shape = list(self.shape)
        if self.expert:
            # (experts, rows, columns)
            shape[0] //= ep
        elif self.dim is not None:
            shape[self.dim] = -(-shape[self.dim] // tp)
        return tuple(shape)


class Sizes(NamedTuple):
    """Numbers of elements of the parameters on a rank.

    Attributes:
        local: elements that tp, ep and pp leave to the rank.
        padded: the same, with padding until the rows divide over the ranks that shard them.
        sharded: this rank's share of the padded elements.
        tensors: number of parameters.
        units: number of FSDP units.
        last: padded elements of the last unit.
        largest: padded elements of the largest unit.
        layer: padded elements of the largest unit other than the head.
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
    """Parts of a model that are alike.

    Attributes:
        role: ``embedding``, ``layer`` or ``head``.
        matrices: its parameters, in the order of the model.
        flops: FLOPs of the forward pass of one sample.
        attention_flops: how many of these compute attention scores. A kernel of causal attention computes half of them.
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
        name: as the command line gave it.
        definition: what the package knows of the model.
        config: its sizes.
        kinds: the different kinds of its parts.
        sequence: the kind of each part (an index into `kinds`), in the order of forward.
        tied: whether embedding and head share one matrix.
        tokens: number of tokens or patches in a sample.
        seq_length: number of tokens in a sample of text; 0 for images.
        program: module of the trainer that runs it.
        flags: flags of that program that choose the model.
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
        """Number of parameters of the full model. A tied matrix counts once."""
        total = sum(self.kinds[kind].parameters for kind in self.sequence)
        if self.tied:
            # The output matrix is the largest of the head.
            total -= max(math.prod(matrix.shape) for matrix in self.kinds[-1].matrices)
        return total

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """FLOPs of each part. Stages of a pipeline are balanced by them."""
        return tuple(self.kinds[kind].flops for kind in self.sequence)

    @property
    def offloads(self) -> bool:
        """Whether its program has a flag for offload."""
        return self.program == "mmm.trainer.lm"

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of one sample. All attention scores count, as in the trainer's mfu."""
        # Backward has twice the FLOPs of forward.
        return 3.0 * sum(self.costs)


def kinds_of(
    model: nn.Module,
    plan: Plan,
    sample: Tensor | None,
    attention_flops: int,
) -> tuple[PartKind, ...]:
    """Embedding, layer and head of a model with one layer.

    Args:
        sample: input that FLOPs are counted with; None to leave them at 0.
        attention_flops: FLOPs of the attention scores of a layer; 0 if they are not causal.
    """
    # With one layer a model has three parts.
    parts = parts_of(model, plan)
    costs = [0] * len(parts)
    if sample is not None:
        costs = part_costs(model, parts, sample)
    kinds = []
    for role, modules, cost in zip(("embedding", "layer", "head"), parts, costs, strict=True):
        scores = 0
        if role == "layer":
            scores = attention_flops
        kinds.append(PartKind(role, matrices_of(model, plan, modules), cost, scores))
    return tuple(kinds)


def matrices_of(model: nn.Module, plan: Plan, modules: Part) -> tuple[Matrix, ...]:
    """The parameters of some modules, in the order of the model."""
    matrices = []
    for module in modules:
        for local_name, parameter in model.get_submodule(module).named_parameters():
            name = f"{module}.{local_name}"
            owner = name.rpartition(".")[0]
            # `Plan.experts` names MoE layers; their child ``experts`` has the matrices.
            expert = any(matches(f"{pattern}.experts", owner) for pattern in plan.experts)
            dim = None if expert else sharded_dim(model, plan, name)
            matrices.append(Matrix(tuple(parameter.shape), dim, expert))
    return tuple(matrices)
