"""Train the reference's Transformer on any layout, with any of the techniques that save memory."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.comparison import relative_error, worst
from mmm.models.definition import check_sizes
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn.init import canonical_name
from mmm.parallel import (
    Layout,
    Techniques,
    build_mesh,
    clip_grad_norm,
    loss_of,
    materialize,
    parallelize,
    sync_gradients,
)
from mmm.parallel.local import detached
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.schedules import stages_of
from mmm.parallel.pp.stages import balance_stages, part_costs, parts_of, take_stage
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import reference
from support.shards import shard_batch

CPU = torch.device("cpu")


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def train(
    rank,
    layout: Layout,
    pieces: dict,
    *,
    steps: int = 2,
    accumulate: int = 1,
    schedule: str = "1F1B",
    config: TransformerConfig = reference.CONFIG,
    dtype: torch.dtype = torch.float64,
    compute: torch.dtype | None = None,
    global_batch: int = reference.GLOBAL_BATCH,
    seq: int = reference.SEQ,
    optimizer: str = "sgd",
):
    """Losses of each step, the gradients of the first that are here, whole, and their norm.

    Args:
        pieces: what `parallelize` takes by name. accumulate: micro-batches, of a pipeline as well.
    """
    check_sizes(config, layout, seq, Techniques(**pieces).ulysses_size(layout.cp))
    mesh = build_mesh(layout, "cpu")
    plan = transformer_plan(config)
    precision = Precision("test", dtype, compute or dtype)
    with torch.device("meta"):
        model: nn.Module = Transformer(config)
        sample = torch.zeros(2, seq, dtype=torch.int64)
    stages: dict[int, nn.Module] = {0: model}
    if layout.pp > 1:
        parts = parts_of(model, plan)
        per_rank = 2 if schedule == "ZBVZeroBubble" else 1
        cuts = balance_stages(part_costs(model, parts, sample), layout.pp * per_rank)
        own = stages_of(layout.coordinates(rank.rank)["pp"], layout.pp, schedule, per_rank)
        stages = {n: take_stage(model, parts, cuts[n]) for n in own}
    for n, stage in stages.items():
        stages[n] = parallelize(stage, mesh, plan, precision, **pieces)
        materialize(stages[n], CPU, reference.SEED)
    size = global_batch // layout.dp
    count = global_batch * seq
    loss_fn = loss_of(*stages.values())
    pipeline = None
    if layout.pp > 1:
        pipeline = Pipeline(
            stages,
            len(cuts),
            mesh,
            schedule=schedule,
            microbatches=accumulate,
            device=CPU,
            loss=lambda output, targets: loss_fn(output, targets, count),
        )
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    parameters = [p for _, p in named]
    step_of = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](parameters, lr=reference.RATE[optimizer])
    losses = []
    first = {}
    norm = math.nan
    evaluated = math.nan
    bound = 1e-12 if dtype == torch.float64 else 1e-3
    for step in range(steps):
        batch = reference.tokens(seq).batch(step, global_batch, layout.dp_coordinate(rank.rank) * size, size)
        shard, positions = shard_batch(batch, layout.coordinates(rank.rank)["cp"], layout.cp)
        # This rank's part of the global batch's loss.
        share = 0.0
        with loss_parallel():
            if pipeline is not None:
                if step == 1:
                    evaluated = pipeline.evaluate(shard.inputs, shard.targets, positions=positions).item()
                share = pipeline.step(shard.inputs, shard.targets, positions=positions).item()
            else:
                (module,) = stages.values()
                with torch.no_grad():
                    evaluated = detached(loss_fn(module(shard.inputs, positions), shard.targets, count)).item()
                for i, (inputs, targets) in enumerate(
                    zip(shard.inputs.chunk(accumulate), shard.targets.chunk(accumulate), strict=True)
                ):
                    sync_gradients(module, i == accumulate - 1)
                    loss = loss_fn(module(inputs, positions), targets, count)
                    loss.backward()
                    share += detached(loss).item()
        assert (pipeline is not None and step != 1) or abs(evaluated - share) <= bound * share, (evaluated, share)
        if step == 0:
            first = {canonical_name(name): whole(p.grad) for name, p in named}
            norm = float(clip_grad_norm(parameters, math.inf, stages=mesh["pp"] if pipeline else None))
        step_of.step()
        step_of.zero_grad()
        shares = gather_floats([share], CPU)
        # Ranks of tp repeat each other's share, and are not counted.
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    return losses, first, norm


def assert_same(ranks: list, expected: tuple[list, dict], losses_within=1e-9, gradients_within=1e-8) -> None:
    """Each rank's losses and norm, and the gradients of all ranks together, against (losses, gradients)."""
    wanted, gradients = expected
    # Stages of a pipeline have some of them each.
    assert set().union(*(first for _, first, _ in ranks)) == gradients.keys()
    whole_norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    for losses, first, norm in ranks:
        off = worst(relative_error(*pair) for pair in zip(losses, wanted, strict=True))
        assert off <= losses_within, f"losses differ by {off:.2e}: {losses} instead of {wanted}"
        for name, gradient in first.items():
            off = ((gradient - gradients[name]).abs().max() / gradients[name].abs().max()).item()
            assert off <= gradients_within, f"gradient of {name} differs by {off:.2e} of its largest element"
        assert abs(norm - whole_norm) <= gradients_within * whole_norm, f"norm differs: {norm}, not {whole_norm}"
