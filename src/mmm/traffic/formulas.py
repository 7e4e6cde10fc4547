"""Computes what a layout has to send: bytes of a rank in a step, by axis of the mesh, from the model's shapes only.

The formulas follow the data flow of this package's plans, with the algorithm for each operation that sends least
(`collective_bytes`). They need no process group. All terms are bytes of one rank's local tensors. On each axis of n
ranks, c = (n-1)/n::

    dp    ddp          2 c G                           G  its gradients
          zero1        2 c G + c P                     P  its parameters before FSDP, padded to a multiple of n rows
          zero2        c G + c P
          fsdp         2 k c P' + c G                  P' in the dtype of compute, k micro-batches (the last unit, and
                                                          what is in none, stay gathered until backward: k c P' of
                                                          them; in a pipeline all does, until the step ends: c P' + c G)
          hsdp         that within dp_shard, and 2 c G / S over dp_replicate, S: ranks of dp_shard
    tp    Transformer  (8 L + 4 of the full model) c A, and 2 c (norms' gradients + 3 elements a token); with fewer
                       key/value heads than ranks also 4 L c (keys or values of all heads)
          GPT          as much, the gradients of the norms' biases, and 2 k c A', of one sample, for positions
          ViT          4 L · 2 c A                     A  batch · local tokens along cp · dim, L layers; and
                                                          2 c (gradients of the biases after rows)
          CNN          2 c (features + classes) batch
    pp                 A / (tp of the Transformer) for each boundary between one of its stages and another rank's, in
                       forward to the stage after it, in backward to the stage before it; 2 c · 8 for the loss; and its
                       shard of the gradient of a weight that a stage on another rank has as well
    cp    ring         L (2 (n-1) K + n K'')           K  its keys and values, K'' their gradients, at least float32
          ulysses      2 L c (Q + K + O)               Q, O its queries and outputs; K repeated until n divides heads
          usp          ulysses over cp_ulysses, ring over cp_ring, each of its own n; K as ulysses has repeated it

Under autocast (zero1 and zero2 in mixed precision) the residual stream, and with it A, has the dtype of the weights:
that is what stages pass on, what is gathered before a product, and what is scattered in backward. The result of a
product has the dtype of compute.

The axes simply add up, with three remarks. If there is cp, FSDP and ZeRO shard over dp_shard × cp, which is an axis of
its own, ``dp_shard_cp`` (with dp_shard 1 it is ``cp``). Under tp each rank has shards of the parameters and local
heads, and A is sharded where the plan does so. Under pp the terms are those of the rank's stages. Gradients of
parameters are summed once, for all micro-batches. A frozen parameter has none, and G is that of the others: with LoRA
(`mmm.nn.lora`) tp sends the gradients of the small matrices that all its ranks have, and none of norms.

Not counted are activation checkpointing, which repeats what layers send in forward; gradient clipping and the record,
which send a few elements in a step; and a pipeline's first step, which sends shapes as well.

Sources: Rajbhandari et al., "ZeRO", 2020 (dp); Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (tp with the sequence sharded), after Shoeybi et al., "Megatron-LM", 2019 (tp); Liu, Zaharia,
Abbeel, "Ring Attention", 2023, and Jacobs et al., "DeepSpeed Ulysses", 2023 (cp).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mmm.layout import UNSHARDED, Layout, Techniques
from mmm.models.costs import Held, Setting
from mmm.models.definition import lookup
from mmm.parallel.collective_bytes import factor, sharded_bytes
from mmm.parallel.dp.fsdp import RESHARD_AFTER_FORWARD, fsdp_units_of
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Plan, sharded_dim
from mmm.parallel.pp.stages import boundaries_of, take_stage
from mmm.parallel.pp.ties import stage_ties
from mmm.runtime.device import Precision


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
    """Compute the bytes that a rank sends in a step, from forward to optimizer.

    Args:
        model: the model before it is parallelized, on the meta device.
        plan: how the model is sharded.
        layout: layout that is fitted to the number of ranks.
        techniques: techniques on the layout's axes.
        partition: partition of the model into pipeline stages.
        stage_ids: indices of this rank's stages (``ParallelModel.modules``).
        batch: samples of a step, for each data-parallel coordinate.
        seq_length: tokens of a sample, for the Transformer.
        precision: data types of the run.

    Returns:
        Axis → bytes. Axes on which the rank sends nothing are left out.

    Raises:
        ValueError: there is no formula for a model of that kind on an axis of the layout.
    """
    n_stages = len(partition.stages)
    # Index → module of each stage that this rank has; without a pipeline the whole model is stage 0.
    own: dict[int, nn.Module] = {}
    for stage_id in stage_ids:
        own[stage_id] = model
        if n_stages:
            own[stage_id] = take_stage(model, partition.parts, partition.stages[stage_id])

    by_axis = _data_parallel(own, plan, layout, precision, techniques, partition.microbatches)
    config = getattr(model, "config", None)
    definition = lookup(config)
    if definition is None:
        if layout.tp * layout.cp * layout.pp > 1:
            raise ValueError(f"no formula for {type(model).__name__} over tp, cp or pp")
        return {axis: sent for axis, sent in by_axis.items() if sent}

    residual = precision.storage if techniques.data_parallel in UNSHARDED else precision.compute
    setting = Setting(
        layout=layout,
        ulysses=techniques.ulysses_size(layout.cp),
        batch=batch,
        microbatches=partition.microbatches,
        sequence=definition.tokens(config, seq_length),
        compute=_size(precision.compute),
        residual=_size(residual),
    )
    held = _held(own, plan, n_stages)
    by_model = definition.costs.sent(config, setting, held)
    for axis, sent in by_model.items():
        by_axis[axis] = by_axis.get(axis, 0.0) + sent
    if layout.tp > 1 and has_frozen(model):
        # The formula of the model has the gradients of all that tp replicates. Of these, only A and B have some.
        elements = sum(_trained_elements(stage, plan) for stage in own.values())
        if held.first:
            # It also has the gradients of the first layer's input: an all-gather for the embedding, and a
            # reduce-scatter. A frozen embedding needs none. The two send as much as one all-reduce.
            elements -= setting.tokens * config.dim  # type: ignore[union-attr]
        by_axis["tp"] += factor("all_reduce", layout.tp) * elements * setting.residual
    if layout.pp > 1:
        for tie in stage_ties(model, partition.names()):
            # The ranks that have a weight of the tie send their shards of its gradient to each other.
            local_stages = tie.keys() & own.keys()
            for stage_id in local_stages:
                stage = own[stage_id]
                if not stage.get_parameter(tie[stage_id]).requires_grad:
                    continue
                names = [name for name, _ in stage.named_parameters()]
                shapes = local_shapes(stage, plan, layout.tp)
                rows, *others = shapes[names.index(tie[stage_id])]
                rows_per_rank = -(-rows // (layout.dp_shard * layout.cp))
                shard = rows_per_rank * math.prod(others) * _size(precision.storage)
                by_axis["pp"] += (len(tie) - len(local_stages)) * shard
    return {axis: sent for axis, sent in by_axis.items() if sent}


def has_frozen(model: nn.Module) -> bool:
    """Whether a model has parameters that are not trained."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def _trained_elements(stage: nn.Module, plan: Plan) -> int:
    """Elements of the trained parameters that each rank of tp has in full, less those of the frozen ones."""
    elements = 0
    for name, parameter in stage.named_parameters():
        if sharded_dim(stage, plan, name) is not None:
            continue
        if parameter.requires_grad:
            elements += parameter.numel()
        else:
            elements -= parameter.numel()
    return elements


def _size(dtype: torch.dtype) -> int:
    """Bytes of an element."""
    return torch.empty(0, dtype=dtype).element_size()


def local_shapes(model: nn.Module, plan: Plan, tp: int) -> list[tuple[int, ...]]:
    """Return the shapes of a tp rank's local parameters, in the order of the model's parameters.

    If tp does not divide a dim, the shape is that of the first rank, which has the most elements.
    """
    shapes = []
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        if tp > 1:
            dim = sharded_dim(model, plan, name)
            if dim is not None:
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
    """Compute what data parallelism sends: axis → bytes.

    Args:
        own: index → module of each stage that this rank has.
    """
    element = _size(precision.storage)
    # FSDP shards parameters over these ranks; zero1 and zero2 shard the optimizer's state over all ranks of dp.
    shards = layout.dp_shard * layout.cp
    ranks = shards
    if techniques.data_parallel in UNSHARDED:
        ranks = max(layout.dp_replicate, shards)
    # Bytes of this rank's parameters that have gradients; and, padded so that rows divide over the ranks, of these, of
    # all, and of those that backward gathers again, because FSDP frees them after forward.
    unpadded = trained = total = again = 0
    for stage in own.values():
        freed = fsdp_units_of(stage, plan)[RESHARD_AFTER_FORWARD[techniques.reshard_after_forward]]
        regathered = {id(parameter) for unit in freed for module in unit for parameter in module.parameters()}
        for (rows, *columns), parameter in zip(local_shapes(stage, plan, layout.tp), stage.parameters(), strict=True):
            row = math.prod(columns) * element
            padded = -(-rows // ranks) * ranks * row
            total += padded
            if parameter.requires_grad:
                trained += padded
                unpadded += rows * row
            if id(parameter) in regathered:
                again += padded
    # In a pipeline all parameters stay gathered until the step ends.
    gathered = total
    if layout.pp == 1:
        gathered = microbatches * (total + again)
    # Parameters are gathered in the dtype of compute.
    narrowing = _size(precision.compute) / element
    return sharded_bytes(techniques.data_parallel, layout, unpadded, trained, narrowing * gathered, trained / shards)


def _held(own: Mapping[int, nn.Module], plan: Plan, n_stages: int) -> Held:
    """Describe what a rank's stages have together."""
    layers = 0
    modules: set[str] = set()
    for stage in own.values():
        layers += len(getattr(stage, "layers", ()))
        # A stage has None in the place of a module that belongs to another stage.
        modules |= {name for name, module in stage.named_children() if module is not None}
    has_first = bool(modules.intersection(_names(plan.stages[0])))
    has_last = bool(modules.intersection(_names(plan.stages[-1])))
    return Held(layers, has_first, has_last, frozenset(modules), boundaries_of(own, n_stages))


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of modules in an entry of a plan's stages, which is one name or several."""
    return (entry,) if isinstance(entry, str) else entry
