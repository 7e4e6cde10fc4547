"""What a layout has to send: bytes a rank and step, by axis of the mesh, from the model's shapes alone.

It is the data flow of this package's plans, each operation by the algorithm that sends least (`collective_bytes`).
Needs no process group. In bytes; on each axis of n ranks, c = (n-1)/n; of one rank's local tensors::

    dp    ddp          2 c G                           G  its gradients
          zero1        2 c G + c P                     P  its parameters before FSDP, padded to a multiple of n rows
          zero2        c G + c P
          fsdp         2 k c P' + c G                  P' in the dtype of compute, k micro-batches (the last unit, and
                                                          what is in none, stay gathered until backward: k c P' of
                                                          them; in a pipeline all does, until the step ends: c P' + c G)
          hsdp         that within dp_shard, and 2 c G / S over dp_replicate, S: ranks of dp_shard
    tp    Transformer  (8 L + 4 of the full model) c A, and 2 c (norms' gradients + 3 elements a token)
          GPT          as much, the gradients of the norms' biases, and 2 k c A', of one sample, for positions
          ViT          4 L · 2 c A                     A  batch · local tokens along cp · dim, L layers
          CNN          2 c (features + classes) batch
    pp                 A / (tp of the Transformer) for each boundary of stages that it faces another rank across, once
                       forward from below it, once backward from above it; and 2 c · 8 for the loss; and its shard of
                       the gradient of a weight that a stage on another rank has as well
    cp    ring         L (2 (n-1) K + n K'')           K  its keys and values, K'' their gradients, at least float32
          ulysses      2 L c (Q + K + O)               Q, O its queries and outputs; K repeated until n divides heads
          usp          ulysses over cp_ulysses, ring over cp_ring, each of its own n; K as ulysses has repeated it

Under autocast (zero1 and zero2 in mixed precision) the residual stream, and with it A, has the dtype of the weights:
that is what stages pass on, and what is gathered before a product, in backward scattered; what a product gives has that
of compute.

The axes simply add up, with three remarks. Where there is cp, FSDP and ZeRO shard over dp_shard × cp, as an axis
of its own, ``dp_shard_cp`` (with dp_shard 1 it is ``cp``). Under tp each rank has shards of the parameters and local
heads, and A is sharded where the plan does so. Under pp the terms are those of the rank's stages. Gradients of
parameters are summed once, for all micro-batches.

Not counted: activation checkpointing, which repeats what layers send in forward; gradient clipping and the record,
which send a few elements a step; a pipeline's first step, which sends shapes as well.

Sources: Rajbhandari et al., "ZeRO", 2020 (dp); Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (tp with the sequence sharded), after Shoeybi et al., "Megatron-LM", 2019 (tp); Liu, Zaharia,
Abbeel, "Ring Attention", 2023, and Jacobs et al., "DeepSpeed Ulysses", 2023 (cp).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.models.costs import Held, Setting
from mmm.models.definition import lookup
from mmm.parallel.collective_bytes import factor, sharded_bytes
from mmm.parallel.dp.fsdp import RESHARD_AFTER_FORWARD, fsdp_units_of
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Plan, sharded_dim
from mmm.parallel.pp.stages import take_stage
from mmm.parallel.ties import stage_ties
from mmm.runtime.device import Precision

LOSS = 8  # bytes of a pipeline's loss


def expected_traffic(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    techniques: Techniques,
    partition: Partition,
    stage_ids: Iterable[int] = (0,),
    *,
    batch: int,
    seq_length: int = 0,
    precision: Precision,
) -> dict[str, float]:
    """Bytes that a rank sends in a step, forward to optimizer, by axis; axes on which it sends nothing are left out.

    Args:
        model: before it is parallelized, on the meta device. layout: fitted to the number of ranks.
        partition: of the model. stage_ids: of this rank's stages (``ParallelModel.modules``).
        batch: samples of a step, per data-parallel coordinate. seq_length: of the Transformer, in tokens.

    Raises:
        ValueError: there is no formula for a model of that kind on an axis of the layout.
    """
    count = len(partition.stages)
    residual = precision.storage if techniques.data_parallel in UNSHARDED else precision.compute
    own = {n: take_stage(model, partition.parts, partition.stages[n]) if count else model for n in stage_ids}
    by_axis = _data_parallel(own, plan, layout, precision, techniques, partition.microbatches)
    config = getattr(model, "config", None)
    definition = lookup(config)
    if definition is None:
        if layout.tp * layout.cp * layout.pp > 1:
            raise ValueError(f"no formula for {type(model).__name__} over tp, cp or pp")
        return {axis: sent for axis, sent in by_axis.items() if sent}
    held = _held(own.values(), plan)
    setting = Setting(
        layout=layout,
        ulysses=techniques.ulysses_size(layout.cp),
        batch=batch,
        microbatches=partition.microbatches,
        sequence=definition.tokens(config, seq_length),
        compute=_size(precision.compute),
        residual=_size(residual),
    )
    for axis, sent in definition.costs.sent(config, setting, held).items():
        by_axis[axis] = by_axis.get(axis, 0.0) + sent
    if layout.pp > 1:
        faced = sum(1 for k in own for other in (k - 1, k + 1) if 0 <= other < count and other not in own)
        by_axis["pp"] = faced * definition.costs.boundary(config, setting) + factor("all_reduce", layout.pp) * LOSS
        for tie in stage_ties(model, partition.names()):
            local = tie.keys() & own.keys()
            for n in local:
                named = zip(own[n].named_parameters(), local_shapes(own[n], plan, layout.tp), strict=True)
                rows, *others = next(shape for (name, _), shape in named if name == tie[n])
                rows = -(-rows // (layout.dp_shard * layout.cp))
                by_axis["pp"] += (len(tie) - len(local)) * rows * math.prod(others) * _size(precision.storage)
    return {axis: sent for axis, sent in by_axis.items() if sent}


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def local_shapes(model: nn.Module, plan: Plan, tp: int) -> list[tuple[int, ...]]:
    """Shapes of a tp rank's local parameters; where tp does not divide a dim, those of the first rank."""
    shapes = []
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if tp > 1 and (dim := sharded_dim(model, plan, name)) is not None:
            shape[dim] = -(-shape[dim] // tp)
        shapes.append(tuple(shape))
    return shapes


def _data_parallel(
    own: Mapping[int, nn.Module],
    plan: Plan,
    layout: Layout,
    precision: Precision,
    techniques: Techniques,
    microbatches: int,
) -> dict[str, float]:
    technique = techniques.data_parallel
    shapes = [shape for stage in own.values() for shape in local_shapes(stage, plan, layout.tp)]
    unpadded = sum(math.prod(shape) for shape in shapes) * _size(precision.storage)
    replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp

    def padded(ranks: int, some: Sequence[tuple[int, ...]] = shapes) -> int:
        """Bytes of parameters, each padded so that its rows divide over the ranks."""
        rows = sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in some)
        return rows * _size(precision.storage)

    if technique in UNSHARDED:
        return sharded_bytes(technique, layout, unpadded, padded(max(replicas, shards)), 0.0, 0.0)
    some = RESHARD_AFTER_FORWARD[techniques.reshard_after_forward]
    units = (unit for stage in own.values() for unit in fsdp_units_of(stage, plan)[some])
    twice = {id(parameter) for unit in units for module in unit for parameter in module.parameters()}
    parameters = [parameter for stage in own.values() for parameter in stage.parameters()]
    again = padded(shards, [shape for shape, p in zip(shapes, parameters, strict=True) if id(p) in twice])
    total = padded(shards)
    gathered = total if layout.pp > 1 else microbatches * (total + again)
    narrow = _size(precision.compute) / _size(precision.storage)
    return sharded_bytes(technique, layout, unpadded, total, narrow * gathered, total / shards)


def _held(stages: Iterable[nn.Module], plan: Plan) -> Held:
    """What a rank's stages have together."""
    layers = 0
    modules: set[str] = set()
    for stage in stages:
        layers += len(getattr(stage, "layers", ()))
        modules |= {name for name, module in stage.named_children() if module is not None}
    first, last = (bool(modules.intersection(_names(part))) for part in (plan.stages[0], plan.stages[-1]))
    return Held(layers, first, last, frozenset(modules))


def _names(part: str | tuple[str, ...]) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else part
