"""Pipelines: losses, gradient norms and every gradient as in plain PyTorch on one process; the split; refusals."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import loss_parallel

from mmm.errors import ConfigError, LayoutError
from mmm.models.draw import canonical_name
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import Layout, Techniques, apply, build_mesh, clip_grad_norm, cross_entropy, materialize
from mmm.parallel.plan import Plan
from mmm.parallel.plans.cnn import cnn_plan
from mmm.parallel.plans.transformer import transformer_plan
from mmm.parallel.plans.vit import vit_plan
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.schedules import SCHEDULES, Schedule, check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, part_costs, parts_of, take_stage
from mmm.runtime.device import Precision
from mmm.runtime.process_group import gather_floats
from support import reference, vision

CPU = torch.device("cpu")
FP64 = Precision("fp64", torch.float64, torch.float64)
DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)  # 8 parts
TEXT = {"deep": DEEP, "text": reference.CONFIG}
PLANS = {"deep": transformer_plan, "text": transformer_plan, "cnn": cnn_plan, "vit": vit_plan}


def build(model: str) -> torch.nn.Module:
    with torch.device("meta"):
        return Transformer(TEXT[model]) if model in TEXT else vision.build(model)


def batch(model: str, step: int, first: int, size: int):
    """Inputs, targets, the global count, and what each stage takes whole."""
    if model in TEXT:
        part = reference.tokens().batch(step, reference.GLOBAL_BATCH, first, size)
        return part.inputs, part.targets, part.count, {"positions": torch.arange(reference.SEQ)}
    images, classes = (whole[first : first + size] for whole in vision.batch(model, step))
    return images, classes, vision.GLOBAL_BATCH, {}


def pipeline_of(rank, model: str, layout: Layout, schedule: str, microbatches: int) -> tuple[Pipeline, object]:
    whole, plan = build(model), PLANS[model]()
    parts = parts_of(whole, plan)
    inputs, _, count, _ = batch(model, 0, 0, 2)
    techniques = Techniques(schedule=schedule, microbatches=microbatches)
    each, _ = check_pipeline(layout, techniques, size_of(model, layout), len(parts))
    inputs = inputs.to("meta", torch.int64 if model in TEXT else torch.float32)
    cuts = balance_stages(part_costs(whole, parts, inputs), layout.pp * each)
    mesh = build_mesh(layout, "cpu")
    mine = {}
    for number in stages_of(layout.coordinates(rank.rank)["pp"], layout.pp, schedule, each):
        mine[number] = apply(take_stage(whole, parts, cuts[number]), mesh, plan, FP64)
        materialize(mine[number], CPU, reference.SEED)

    def loss(output, targets):
        return cross_entropy(output, targets, count)

    made = Pipeline(mine, len(cuts), mesh, schedule=schedule, microbatches=microbatches, loss=loss, device=CPU)
    return made, mesh["pp"]


def size_of(model: str, layout: Layout) -> int:
    return (reference.GLOBAL_BATCH if model in TEXT else vision.GLOBAL_BATCH) // layout.dp


def train_one(rank, model: str, layout: Layout, schedule: str, microbatches: int, steps: int, bug: str = ""):
    """Losses and norms of each step, the gradients of the first that are here, and losses of evaluations."""
    pipeline, axis = pipeline_of(rank, model, layout, schedule, microbatches)
    if bug == "divided by the micro-batches":
        pipeline.schedule.scale_grads = True
    if bug == "mean of each micro-batch":
        pipeline.schedule._loss_fn = lambda output, targets: cross_entropy(output, targets, targets.numel())
    rate, limit = (reference.RATE, math.inf) if model in TEXT else (vision.RATE, vision.MAX_NORM[model])
    named = [pair for stage in pipeline.stages.values() for pair in stage.named_parameters()]
    optimizer = torch.optim.SGD([p for _, p in named], lr=rate["sgd"])
    size = size_of(model, layout)
    losses, norms, first, evaluated = [], [], {}, []
    for step in range(steps):
        inputs, targets, _, whole = batch(model, step, layout.dp_coordinate(rank.rank) * size, size)
        with loss_parallel():
            if step == 1 and schedule in ("1F1B", "ZBVZeroBubble"):
                evaluated = [pipeline.evaluate(inputs, targets, **whole).item() for _ in range(2)]
            share = pipeline.step(inputs, targets, **whole).item()
        if step == 0:
            first = {canonical_name(name): p.grad.full_tensor().clone() for name, p in named}
        norms.append(clip_grad_norm([p for _, p in named], limit, stages=axis).item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            assert evaluated == [pytest.approx(share, rel=1e-12)] * len(evaluated)
        shares = gather_floats([share], CPU)
        losses.append(sum(shares[r][0] for r in layout.loss_ranks()))
    return losses, norms, first


def train(rank, model: str, layout: Layout, runs: list[tuple]):
    return [train_one(rank, model, layout, *run) for run in runs]


def assert_same(model: str, ranks: list, steps: int) -> None:
    """Each rank's losses and norms, and the gradients of all ranks together, against the reference."""
    if model in TEXT:
        expected_losses, expected = reference.train("sgd", torch.float64, 10, TEXT[model])
        expected_norms = []
    else:
        expected_losses, expected_norms, expected = vision.train(model, "sgd")
    assert set().union(*(first for _, _, first in ranks)) == expected.keys()
    for losses, norms, first in ranks:
        for name, gradient in first.items():
            off = ((gradient - expected[name]).abs().max() / expected[name].abs().max()).item()
            assert off <= 1e-8, f"gradient of {name} differs by {off:.2e} of its largest element"
        for what, got, wanted in (("losses", losses, expected_losses), ("norms", norms, expected_norms)):
            worst = max((abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=False)), default=0)
            assert worst <= 1e-9, f"{what} differ by {worst:.2e}: {got} instead of {wanted}"
        assert len(losses) == steps
        whole = math.sqrt(sum(g.square().sum().item() for g in expected.values()))
        assert norms[0] == pytest.approx(whole, rel=1e-12)


def check(run_on_ranks, model: str, layout: Layout, runs: list[tuple]) -> None:
    ranks = run_on_ranks(train, layout.ranks, model, layout, runs)
    for i, (_, _, steps) in enumerate(runs):
        assert_same(model, [results[i] for results in ranks], steps)


EVERY = {
    "GPipe": 4,
    "1F1B": 4,
    "Interleaved1F1B": 4,
    "LoopedBFS": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 8,
}


@pytest.mark.long
@pytest.mark.parametrize(("pp", "model"), [(2, "text"), (4, "deep")])
def test_every_schedule(run_on_ranks, pp, model):
    assert EVERY.keys() == SCHEDULES.keys()
    steps = {"1F1B": 10, "ZBVZeroBubble": 10} if pp == 2 else {}
    runs = [(schedule, count, steps.get(schedule, 2)) for schedule, count in EVERY.items()]
    check(run_on_ranks, model, Layout(pp=pp, dp_shard=1), runs)


class ScheduleNoted(ScheduleGPipe):
    """A schedule of one's own: PyTorch's, made with the micro-batches noted."""

    made: ClassVar[list[int]] = []

    def __init__(self, stage, microbatches, **given):
        super().__init__(stage, microbatches, **given)
        self.made.append(microbatches)


def train_by_own(rank, *given):
    with patch.dict(SCHEDULES, {"Own": Schedule(own=ScheduleNoted)}):
        found = train(rank, *given)
    assert ScheduleNoted.made == [4]
    return found


def test_a_schedule_of_ones_own(run_on_ranks):
    ranks = run_on_ranks(train_by_own, 2, "text", Layout(pp=2, dp_shard=1), [("Own", 4, 2)])
    assert_same("text", [result for (result,) in ranks], 2)


WITH_TP = pytest.param(Layout(pp=2, dp_shard=1, tp=2), marks=pytest.mark.long)


@pytest.mark.parametrize("layout", [Layout(pp=2, dp_shard=2), WITH_TP], ids=str)
def test_with_data_and_tensor_parallel(run_on_ranks, layout):
    check(run_on_ranks, "text", layout, [("1F1B", 2, 10), ("ZBVZeroBubble", 4, 2)])


@pytest.mark.long
@pytest.mark.parametrize("model", ["cnn", "vit"])
def test_images(run_on_ranks, model):
    check(run_on_ranks, model, Layout(pp=2, dp_shard=1), [("1F1B", 4, 10), ("ZBVZeroBubble", 3, 2)])
    check(run_on_ranks, model, Layout(pp=2, dp_shard=1, tp=2), [("1F1B", 2, 2)])


def test_planted_bugs_are_caught(run_on_ranks):
    bugs = ["divided by the micro-batches", "mean of each micro-batch"]
    ranks = run_on_ranks(train, 2, "text", Layout(pp=2, dp_shard=1), [("1F1B", 4, 2, bug) for bug in bugs])
    for i in range(len(bugs)):
        with pytest.raises(AssertionError, match="differ"):
            assert_same("text", [results[i] for results in ranks], 2)


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
    inputs = batch(model, 0, 0, 2)[0]
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
    assert "pp 1: a pipeline has at least 2 ranks" in refusal(pp=1)
    assert "stages_per_rank 3: ZBVZeroBubble takes exactly 2" in refusal("ZBVZeroBubble", each=3)
    assert "stages_per_rank 1: LoopedBFS takes at least 2" in refusal("LoopedBFS", each=1)
    text = refusal("Interleaved1F1B", pp=4)
    assert "4 with 2 stages a rank is 8 stages, and the model has 6 parts" in text
    assert "use fewer, or a model with more layers" in text
    assert "1F1B with pp 4 needs at least 4" in refusal(pp=4, microbatches=2)
    assert "16 a data-parallel coordinate cannot be split into 5 equal parts" in refusal(microbatches=5)
    text = refusal("Interleaved1F1B", microbatches=3, batch=12)
    assert "Interleaved1F1B needs a multiple of pp 2" in text
    assert "DualPipeV with pp 2 needs at least 4" in refusal("DualPipeV", microbatches=2)
    assert "it must be at least 1" in refusal("GPipe", microbatches=0)
    assert "leave compile out, or use 1F1B" in refusal("ZBVZeroBubble", compile=True)
    assert "use bf16 or fp32" in refusal(dtype="fp16")
    two, interleaved = Layout(pp=2, dp_shard=1), Techniques(schedule="Interleaved1F1B", microbatches=4)
    assert check_pipeline(two, interleaved, 16, 6) == (2, 4)
    assert check_pipeline(two, replace(interleaved, stages_per_rank=3), 16, 6) == (3, 4)
    assert check_pipeline(two, Techniques(microbatches=8, compile=True), 16, 6) == (1, 8)
    assert check_pipeline(two, Techniques(schedule="DualPipeV"), 16, 6) == (2, 4)  # the fewest


def test_where_stages_lie():
    assert [stages_of(r, 2, "Interleaved1F1B", 3) for r in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of(r, 3, "ZBVZeroBubble", 2) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
