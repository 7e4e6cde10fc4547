"""Pipelines: a schedule of one's own, the split, refusals."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.distributed.pipelining import ScheduleGPipe

from mmm.errors import ConfigError, LayoutError
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.parallel import Layout, Techniques
from mmm.parallel.plan import Plan
from mmm.parallel.pp.schedules import SCHEDULES, Schedule, check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, part_costs, parts_of, take_stage
from support import anywhere, reference, vision

DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)  # 8 parts
TEXT = {"deep": DEEP, "text": reference.CONFIG}
PLANS = {"deep": transformer_plan, "text": transformer_plan, "cnn": cnn_plan, "vit": vit_plan}


def build(model: str) -> torch.nn.Module:
    with torch.device("meta"):
        return Transformer(TEXT[model]) if model in TEXT else vision.build(model)


class ScheduleNoted(ScheduleGPipe):
    """A schedule of one's own: PyTorch's, made with the micro-batches noted."""

    made: ClassVar[list[int]] = []

    def __init__(self, stage, microbatches, **given):
        super().__init__(stage, microbatches, **given)
        self.made.append(microbatches)


def train_by_own(rank):
    with patch.dict(SCHEDULES, {"Own": Schedule(own=ScheduleNoted)}):
        found = anywhere.train(rank, Layout(pp=2, dp_shard=1), {}, accumulate=4, schedule="Own")
    assert ScheduleNoted.made == [4]
    return found


def test_a_schedule_of_ones_own(run_on_ranks):
    anywhere.assert_same(run_on_ranks(train_by_own, 2), reference.train("sgd", torch.float64, 2))


@pytest.mark.parametrize("costs", [[0, 4, 4, 4, 4, 6], [1, 1, 1, 9], [5, 1, 1, 1, 5, 2, 2], [3]])
def test_cuts_are_the_best_there_are(costs):
    for stages in range(1, len(costs) + 1):
        got = balance_stages(costs, stages)
        assert [i for held in got for i in held] == list(range(len(costs)))
        ends = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), stages - 1)]
        sums = [[sum(costs[a:b]) for a, b in pairwise(e)] for e in ends]
        best = min((max(s), sum(x * x for x in s)) for s in sums)
        mine = [sum(costs[i] for i in held) for held in got]
        assert (max(mine), sum(x * x for x in mine)) == best


def test_costs_are_counted():
    """A matrix costs 2 · tokens · rows · columns, a lookup nothing; the output layer keeps layers out of its stage."""
    config = replace(DEEP, vocab_size=2048)
    with torch.device("meta"):
        model, tokens = Transformer(config), torch.zeros(2, 16, dtype=torch.int64)
    parts = parts_of(model, transformer_plan())
    assert parts == [("tok_embeddings",), *[(f"layers.{i}",) for i in range(6)], ("norm", "output")]
    costs = part_costs(model, parts, tokens)
    matrices = sum(p.numel() for p in model.layers["0"].parameters() if p.ndim == 2)
    assert costs[0] == 0
    assert costs[-1] == 2 * 32 * 32 * 2048
    assert costs[1] == 2 * 32 * matrices + 2 * 2 * (2 * 4 * 16 * 16 * 8)  # q kᵀ and its product with v
    assert balance_stages(costs, 2) == [range(7), range(7, 8)]
    with torch.device("meta"):
        costs = part_costs(Transformer(replace(DEEP, vocab_size=512)), parts, tokens)
    assert balance_stages(costs, 2) == [
        range(5),
        range(5, 8),
    ]  # embedding and 4 layers; 2 layers and the output, which is as 2


@pytest.mark.parametrize("model", PLANS)
def test_stages_are_the_model(model):
    """Every parameter is in one stage, under its own name; one after the other they give what the model gives."""
    whole, plan = build(model), PLANS[model]()
    parts = parts_of(whole, plan)
    stages = [take_stage(whole, parts, held) for held in balance_stages([1] * len(parts), len(parts))]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    inputs = reference.tokens().batch(0, 2, 0, 2).inputs if model in TEXT else vision.batch(model, 0)[0]
    real = (Transformer(TEXT[model]) if model in TEXT else vision.build(model)).double()
    x = inputs
    for held in balance_stages([1] * len(parts), len(parts)):
        x = take_stage(real, parts, held)(x)
    torch.testing.assert_close(x, real(inputs), rtol=0, atol=0)


def test_a_plan_that_forgets_parameters():
    with pytest.raises(LayoutError, match=r"2 parameters \(fc2\.weight first\) into no pipeline stage"):
        parts_of(build("cnn"), Plan(tensor={}, fsdp_units=(), stages=("conv1", "conv2", "fc1")))


def refusal(schedule="1F1B", pp=2, microbatches=8, batch=16, parts=6, each=None, dtype="", compile=False) -> str:
    techniques = Techniques(schedule=schedule, microbatches=microbatches, stages_per_rank=each, compile=compile)
    with pytest.raises((LayoutError, ConfigError)) as caught:
        check_pipeline(Layout(pp=pp, dp_shard=1), techniques, batch, parts, dtype)
    return str(caught.value)


def test_refusals():
    assert "one of GPipe, 1F1B" in refusal("1f1b")
    assert "pp 1" in refusal(pp=1)
    assert "stages_per_rank 3: ZBVZeroBubble" in refusal("ZBVZeroBubble", each=3)
    assert "stages_per_rank 1: LoopedBFS" in refusal("LoopedBFS", each=1)
    text = refusal("Interleaved1F1B", pp=4)
    assert "8 stages" in text
    assert "6 parts" in text
    assert "1F1B with pp 4" in refusal(pp=4, microbatches=2)
    assert "5 equal parts" in refusal(microbatches=5)
    assert "a multiple of pp 2" in refusal("Interleaved1F1B", microbatches=3, batch=12)
    assert "DualPipeV with pp 2" in refusal("DualPipeV", microbatches=2)
    assert "microbatches 0" in refusal("GPipe", microbatches=0)
    assert "compile" in refusal("ZBVZeroBubble", compile=True)
    assert "use bf16 or fp32" in refusal(dtype="fp16")
    two, interleaved = Layout(pp=2, dp_shard=1), Techniques(schedule="Interleaved1F1B", microbatches=4)
    assert check_pipeline(two, interleaved, 16, 6) == (2, 4)
    assert check_pipeline(two, replace(interleaved, stages_per_rank=3), 16, 6) == (3, 4)
    assert check_pipeline(two, Techniques(microbatches=8, compile=True), 16, 6) == (1, 8)
    assert check_pipeline(two, Techniques(schedule="DualPipeV"), 16, 6) == (2, 4)  # the fewest


def test_where_stages_lie():
    assert [stages_of(r, 2, "Interleaved1F1B", 3) for r in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of(r, 3, "ZBVZeroBubble", 2) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
