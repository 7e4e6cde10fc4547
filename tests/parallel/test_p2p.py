"""Groups for each direction between two ranks of a pipeline: what goes through them; the numbers stay."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch.distributed as dist

from mmm.parallel import Layout, build_mesh
from mmm.parallel.mesh import build_p2p_groups, neighbour_rounds
from mmm.parallel.pp.p2p import batch_by_group
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.schedules import SCHEDULES, stages_of
from mmm.torch_private.pipelining import batching
from parallel import test_pipeline

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

    def kept(*given, **named):
        pipeline, on = Pipeline(*given, **named), given[2]
        pipelines.append((pipeline.group, on.p2p))
        return pipeline

    mesh = with_groups if own_groups else build_mesh
    for schedule in schedules:
        messages: Counter = Counter()
        with (
            patch.object(dist, "batch_isend_irecv", noted),
            patch.object(test_pipeline, "build_mesh", mesh),
            patch.object(test_pipeline, "Pipeline", kept),
        ):
            trained = test_pipeline.train_one(rank, "deep", layout, schedule, MICROBATCHES.get(schedule, 4), STEPS)
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


LAYOUTS = [
    pytest.param(Layout(pp=2, dp_shard=1), [*SCHEDULES], marks=pytest.mark.long),
    pytest.param(Layout(pp=3, dp_shard=1), ["1F1B", "LoopedBFS"], marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp_shard=1, tp=2), ["1F1B", "ZBVZeroBubble"], marks=pytest.mark.long),
    pytest.param(Layout(pp=4, dp_shard=1), ["GPipe", "1F1B"], marks=pytest.mark.long),
]


@pytest.mark.parametrize(("layout", "schedules"), LAYOUTS, ids=str)
def test_same_numbers(run_on_ranks, layout, schedules):
    shared = run_on_ranks(train, layout.ranks, layout, schedules, False)
    own = run_on_ranks(train, layout.ranks, layout, schedules, True)
    for rank, (with_one_group, with_own) in enumerate(zip(shared, own, strict=True)):
        at = layout.coordinates(rank)["pp"]
        for schedule, (trained, everything), (again, messages) in zip(schedules, with_one_group, with_own, strict=True):
            assert again[:2] == trained[:2], schedule  # losses and norms, bit for bit
            assert all((again[2][name] == gradient).all() for name, gradient in trained[2].items()), schedule
            in_pp = messages.pop("pp", 0)  # shapes, in the first step
            assert messages == expected(layout.pp, at, schedule), (rank, schedule)
            assert everything == Counter(pp=in_pp + sum(messages.values())), (rank, schedule)


def build(rank, layout: Layout, device_type: str):
    return sorted(build_mesh(layout, device_type).p2p)


def test_cpu_ranks_have_none(run_on_ranks):
    assert run_on_ranks(build, 2, Layout(pp=2, dp_shard=1), "cpu") == [[], []]


def test_the_schedules_function_comes_back():
    from torch.distributed.pipelining import schedules

    before = schedules._batch_p2p
    with batching(batch_by_group):
        assert schedules._batch_p2p is batch_by_group
    assert schedules._batch_p2p is before
