"""What a layout has to send: bytes a rank and step, by axis of the mesh, from the model's shapes alone.

It is the data flow of this package's plans, each operation by the algorithm that no other undercuts
(`collective_bytes`). Needs no process group. In bytes; on each axis of n ranks, c = (n-1)/n; of what one rank holds::

    dp    ddp          2 c G                           G  its gradients
          zero1        2 c G + c P                     P  its parameters before FSDP, rows filled up to a multiple of n
          zero2        c G + c P
          fsdp         2 k c P' + c G                  P' in the dtype of compute, k micro-batches (what is in no unit
                                                          stays gathered until backward: k c P' of it; in a pipeline
                                                          all does, for the whole step: c P' + c G)
          hsdp         that within dp_shard, and 2 c G / S over dp_replicate, S: ranks of dp_shard
    tp    Transformer  (8 L + 4 if all parts are here) c A, and 2 c (norms' gradients + 3 numbers a token)
          ViT          4 L · 2 c A                     A  batch · tokens held along cp · dim, L layers
          CNN          2 c (features + classes) batch
    pp                 A / (tp of the Transformer) for each boundary of stages that it faces another rank across, once
                       forward from below it, once backward from above it; and 2 c · 8 for the loss
    cp    ring         L (2 (n-1) K + n K'')           K  its keys and values, K'' their gradients, at least float32
          ulysses      2 L c (Q + K + O)               Q, O its queries and outputs; K repeated until n divides heads

The axes' shares simply add up, with three things to know. FSDP cuts over dp_shard × cp together where there is cp, as
an axis of its own, ``dp_shard_cp`` (with dp_shard 1 it is ``cp``). Under tp each rank has its part of the parameters
and heads, and A is cut where the plan cuts it. Under pp the terms are those of the stages that are here. However many
the micro-batches, what is a gradient of parameters is summed once.

Not in it: activation checkpointing, which repeats what layers send forward; gradient clipping and the record, which
send a few numbers a step; a pipeline's first step, which sends shapes as well.

Sources: Rajbhandari et al., "ZeRO", 2020 (dp); Korthikanti et al., "Reducing activation recomputation in large
Transformer models", 2022 (tp with the sequence cut), after Shoeybi et al., "Megatron-LM", 2019 (tp); Liu, Zaharia,
Abbeel, "Ring Attention", 2023, and Jacobs et al., "DeepSpeed Ulysses", 2023 (cp).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.analysis.collective_bytes import factor
from mmm.models.cnn import CNN
from mmm.models.transformer import Transformer
from mmm.models.vit import ViT
from mmm.parallel.mesh import Layout
from mmm.parallel.partition import Partition
from mmm.parallel.pipeline.stages import take_stage
from mmm.parallel.plan import Plan, matches
from mmm.parallel.techniques import Techniques
from mmm.runtime.device import Precision

LOSS = 8  # bytes of the number that a pipeline's ranks share


def expected_traffic(
    model: nn.Module | Mapping[int, nn.Module],
    plan: Plan,
    layout: Layout,
    *,
    batch: int,
    seq_length: int = 0,
    precision: Precision,
    data_parallel: str = "fsdp",
    cp_style: str = "ring",
    microbatches: int = 1,
    stages: int = 1,
) -> dict[str, float]:
    """Bytes that a rank sends in a step, forward to optimizer, by axis; axes on which it sends nothing are left out.

    Args:
        model: as it is before anything is cut, on the meta device. In a pipeline: by number, the stages of this rank.
        layout: fitted to the number of ranks.
        batch: samples of a step, per data-parallel coordinate. seq_length: of the Transformer, in tokens.
        precision: of the run. data_parallel, cp_style: as `parallel.apply` takes them.
        microbatches: forwards and backwards of a step; gradients are summed over the ranks at the last.
        stages: of the pipeline, over all ranks.

    Raises:
        ValueError: a model that is cut along an axis for which there is no formula here.
    """
    held = dict(model) if isinstance(model, Mapping) else {0: model}
    found = _data_parallel(held, plan, layout, precision, data_parallel, microbatches)
    if layout.tp > 1:
        found["tp"] = sum(_tensor(stage, layout, batch, seq_length, precision) for stage in held.values())
    if layout.cp > 1:
        ways = sum(_context(stage, layout, batch, seq_length, precision, cp_style) for stage in held.values())
        found["cp"] = found.get("cp", 0.0) + ways
    if layout.pp > 1:
        faced = sum(1 for k in held for other in (k - 1, k + 1) if 0 <= other < stages and other not in held)
        passed = _activations(next(iter(held.values())), layout, batch, seq_length, precision)
        found["pp"] = faced * passed + factor("all_reduce", layout.pp) * LOSS
    return {axis: count for axis, count in found.items() if count}


def assembled_traffic(
    model: nn.Module,
    plan: Plan,
    layout: Layout,
    techniques: Techniques,
    partition: Partition,
    numbers: Iterable[int],
    *,
    batch: int,
    seq_length: int,
    precision: Precision,
) -> dict[str, float]:
    """`expected_traffic` of the rank that holds stages `numbers` (``ParallelModel.modules``) of a divided model.

    Args:
        model: as `partition_model` was given it, on the meta device and not cut.
    """
    held = {
        number: take_stage(model, partition.parts, partition.stages[number]) if partition.stages else model
        for number in numbers
    }
    return expected_traffic(
        held,
        plan,
        layout,
        batch=batch,
        seq_length=seq_length,
        precision=precision,
        data_parallel=techniques.data_parallel,
        cp_style=techniques.cp_style,
        microbatches=partition.microbatches,
        stages=max(1, len(partition.stages)),
    )


def _size(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def held_shapes(model: nn.Module, plan: Plan, tp: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters that a rank of tp holds; where tp does not divide a dim, those of the first rank."""
    shapes = []
    for name, parameter in model.named_parameters():
        module_name, _, own_name = name.rpartition(".")
        shape = list(parameter.shape)
        style = next((style for pattern, style in plan.tensor.items() if matches(pattern, module_name)), None)
        by_rows = isinstance(style, RowwiseParallel)
        if tp > 1 and (isinstance(style, ColwiseParallel) or (by_rows and own_name != "bias")):
            linear = isinstance(model.get_submodule(module_name), nn.Linear)
            dim = 1 if by_rows and linear else 0  # Linear keeps its matrix transposed; an embedding's rows are its rows
            shape[dim] = -(-shape[dim] // tp)
        shapes.append(tuple(shape))
    return shapes


def _data_parallel(
    held: Mapping[int, nn.Module], plan: Plan, layout: Layout, precision: Precision, technique: str, microbatches: int
) -> dict[str, float]:
    shapes = [shape for stage in held.values() for shape in held_shapes(stage, plan, layout.tp)]
    names = [name for stage in held.values() for name, _ in stage.named_parameters()]
    units = [pattern for unit in plan.fsdp_units for pattern in ((unit,) if isinstance(unit, str) else unit)]

    def root(name: str) -> bool:
        """Whether a parameter is in no unit of the plan, and so goes with the root."""
        parts = name.split(".")
        return not any(matches(unit, ".".join(parts[:n])) for unit in units for n in range(1, len(parts)))

    whole = sum(math.prod(shape) for shape in shapes) * _size(precision.storage)
    replicas, shards = layout.dp_replicate, layout.dp_shard * layout.cp

    def filled(ranks: int, some: Sequence[tuple[int, ...]] = shapes) -> int:
        """Bytes of parameters, with the rows added that make each divide over the ranks."""
        rows = sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in some)
        return rows * _size(precision.storage)

    if technique in ("ddp", "zero1", "zero2"):
        axis = "dp_replicate" if replicas > 1 else "dp_shard"
        n = max(replicas, layout.dp_shard)
        if technique == "ddp":
            return {axis: factor("all_reduce", n) * whole}
        summed = factor("all_reduce", n) * whole if technique == "zero1" else factor("reduce_scatter", n) * filled(n)
        return {axis: summed + factor("all_gather", n) * filled(n)}
    narrow = _size(precision.compute) / _size(precision.storage)
    padded, of_root = filled(shards), filled(shards, [s for s, name in zip(shapes, names, strict=True) if root(name)])
    once = factor("all_gather", shards) * padded
    if layout.pp > 1:
        gathered = float(padded)
    else:
        gathered = microbatches * (2.0 * padded - of_root)
    axis = "dp_shard" if layout.cp == 1 else "cp" if layout.dp_shard == 1 else "dp_shard_cp"
    return {
        axis: factor("all_gather", shards) * narrow * gathered + once,
        "dp_replicate": factor("all_reduce", replicas) * padded / shards,
    }


def _activations(model: nn.Module, layout: Layout, batch: int, seq_length: int, precision: Precision) -> float:
    """Bytes of what passes between two layers of this rank, for all samples of the step."""
    size = _size(precision.compute)
    if isinstance(model, Transformer):
        return batch * seq_length / layout.cp / layout.tp * model.config.dim * size
    if isinstance(model, ViT):
        return batch * model.config.patches * model.config.dim * size
    raise ValueError(f"no formula for what passes between the stages of {type(model).__name__}")


def _tensor(model: nn.Module, layout: Layout, batch: int, seq_length: int, precision: Precision) -> float:
    part, size = factor("all_gather", layout.tp), _size(precision.compute)
    if isinstance(model, Transformer):
        tokens, dim, layers = batch * seq_length // layout.cp, model.config.dim, len(model.layers)
        first, last = model.tok_embeddings is not None, model.output is not None
        # An all-gather before columns, a reduce-scatter after rows, and in backward each the other way round.
        gathers_and_scatters = 2 * (4 * layers + first + last)
        norms = 2 * layers + last  # each rank has the gradient from its own tokens
        wide = max(_size(precision.compute), 4)
        loss = 3 * tokens * wide * last  # the largest logit, the sum of exponentials, the target's own logit
        summed = norms * dim * size + loss
        return part * (gathers_and_scatters * tokens * dim * size + 2 * summed)
    if isinstance(model, ViT):
        return 4 * len(model.layers) * 2 * part * batch * model.config.patches * model.config.dim * size
    if isinstance(model, CNN):
        ways = model.config.features * (model.fc1 is not None) + model.config.classes * (model.fc2 is not None)
        return 2 * part * batch * ways * size
    raise ValueError(f"no formula for {type(model).__name__} cut over tp")


def _context(model: nn.Module, layout: Layout, batch: int, seq_length: int, precision: Precision, style: str) -> float:
    if not isinstance(model, Transformer):
        raise ValueError(f"no formula for {type(model).__name__} cut over cp")
    config, n, size = model.config, layout.cp, _size(precision.compute)
    heads, kv_heads = config.n_heads // layout.tp, config.n_kv_heads // layout.tp
    a_head = batch * seq_length // n * config.head_dim  # numbers in one head of this rank's tokens
    if style == "ring":
        keys, wide = 2 * kv_heads * a_head, max(size, 4)
        return len(model.layers) * keys * (2 * (n - 1) * size + n * wide)
    sent = heads + 2 * math.lcm(kv_heads, n) + heads  # queries, keys and values, outputs
    return 2 * len(model.layers) * factor("all_to_all", n) * sent * a_head * size
