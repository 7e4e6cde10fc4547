"""Groups for each direction between two ranks of a pipeline: what goes through them; the numbers stay."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

from mmm.models.draw import canonical_name
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, Techniques, apply, build_mesh, clip_grad_norm, cross_entropy, materialize
from mmm.parallel.mesh import build_p2p_groups, neighbour_rounds
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.schedules import SCHEDULES, check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, part_costs, parts_of, take_stage
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import reference

CPU = torch.device("cpu")
FP64 = Precision("fp64", torch.float64, torch.float64)
DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)  # 8 parts
STEPS = 2
MICROBATCHES = {"DualPipeV": 8}  # others: 4


@pytest.mark.parametrize("pp", range(2, 10))
def test_rounds_have_each_pair_once(pp):
    rounds = neighbour_rounds(pp)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank is in two groups of a round"
    found = sorted(frozenset(pair) for pairs in rounds for pair in pairs)
    assert len(found) == len(set(found))
    assert set(found) == {frozenset((at, (at + 1) % pp)) for at in range(pp)}
    assert len(rounds) == (1 if pp == 2 else 2 + pp % 2)


def with_groups(layout: Layout, device_type: str):
    return replace(build_mesh(layout, device_type), p2p=build_p2p_groups(layout))


def batch(step: int, first: int, size: int):
    part = reference.tokens().batch(step, reference.GLOBAL_BATCH, first, size)
    return part.inputs, part.targets, part.count, {"positions": torch.arange(reference.SEQ)}


def pipeline_of(rank, layout: Layout, mesh, schedule: str, microbatches: int) -> Pipeline:
    with torch.device("meta"):
        whole = Transformer(DEEP)
    plan = transformer_plan()
    parts = parts_of(whole, plan)
    inputs, _, count, _ = batch(0, 0, 2)
    techniques = Techniques(schedule=schedule, microbatches=microbatches)
    per_rank, _ = check_pipeline(layout, techniques, reference.GLOBAL_BATCH // layout.dp, len(parts))
    cuts = balance_stages(part_costs(whole, parts, inputs.to("meta")), layout.pp * per_rank)
    stages = {}
    for stage in stages_of(layout.coordinates(rank.rank)["pp"], layout.pp, schedule, per_rank):
        stages[stage] = apply(take_stage(whole, parts, cuts[stage]), mesh, plan, FP64)
        materialize(stages[stage], CPU, reference.SEED)

    def loss(output, targets):
        return cross_entropy(output, targets, count)

    return Pipeline(stages, len(cuts), mesh, schedule=schedule, microbatches=microbatches, loss=loss, device=CPU)


def train_one(rank, layout: Layout, mesh, pipeline: Pipeline, schedule: str):
    """Losses and norms of each step, and the gradients of the first that are here."""
    named = [pair for stage in pipeline.stages.values() for pair in stage.named_parameters()]
    parameters = [parameter for _, parameter in named]
    optimizer = torch.optim.SGD(parameters, lr=reference.RATE["sgd"])
    size = reference.GLOBAL_BATCH // layout.dp
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        inputs, targets, _, whole = batch(step, layout.dp_coordinate(rank.rank) * size, size)
        with loss_parallel():
            if step == 1 and schedule in ("1F1B", "ZBVZeroBubble"):
                for _ in range(2):
                    pipeline.evaluate(inputs, targets, **whole)
            loss = pipeline.step(inputs, targets, **whole).item()
        if step == 0:
            first = {canonical_name(name): p.grad.full_tensor().clone() for name, p in named}
        norms.append(clip_grad_norm(parameters, float("inf"), stages=mesh["pp"]).item())
        optimizer.step()
        optimizer.zero_grad()
        everyone = gather_floats([loss], CPU)
        losses.append(sum(everyone[loss_rank][0] for loss_rank in layout.loss_ranks()))
    return losses, norms, first


def train(rank, layout: Layout, schedules: list[str], own_groups: bool):
    """Of each schedule losses, norms and gradients, and the messages by group."""
    answers, pipelines = [], []
    batched = dist.batch_isend_irecv

    def noted(ops):
        pipe, p2p = pipelines[-1]
        pair = next((pair for pair, group in p2p.items() if group is ops[0].group), None)
        if pair is None:
            messages["pp"] += len(ops)
        else:
            sends = pair[0] == pipe.rank()
            assert {op.op for op in ops} == {dist.isend if sends else dist.irecv}, (pair, ops)
            members = sorted(dist.get_global_rank(pipe, at) for at in pair)
            assert dist.get_process_group_ranks(ops[0].group) == members
            messages[pair, "sent" if sends else "received"] += len(ops)
        return batched(ops)

    for schedule in schedules:
        messages: Counter = Counter()
        mesh = with_groups(layout, "cpu") if own_groups else build_mesh(layout, "cpu")
        pipeline = pipeline_of(rank, layout, mesh, schedule, MICROBATCHES.get(schedule, 4))
        pipelines.append((pipeline.group, mesh.p2p))
        with patch.object(dist, "batch_isend_irecv", noted):
            trained = train_one(rank, layout, mesh, pipeline, schedule)
        answers.append((trained, messages))
    return answers


def expected(pp: int, at: int, schedule: str) -> Counter:
    """What a rank sends and receives, by pair and direction; an evaluation has no backward."""
    per_rank = 2 if SCHEDULES[schedule].least == 2 else 1
    rank_of = {stage: rank for rank in range(pp) for stage in stages_of(rank, pp, schedule, per_rank)}
    forwards = STEPS + (2 if schedule in ("1F1B", "ZBVZeroBubble") else 0)
    messages: Counter = Counter()
    for a, b in pairwise(rank_of[stage] for stage in sorted(rank_of)):
        if a != b:
            for pair, times in (((a, b), forwards), ((b, a), STEPS)):
                if at in pair:
                    messages[pair, "sent" if at == pair[0] else "received"] += times * MICROBATCHES.get(schedule, 4)
    return messages


def build(rank, layout: Layout, device_type: str):
    return sorted(build_mesh(layout, device_type).p2p)
