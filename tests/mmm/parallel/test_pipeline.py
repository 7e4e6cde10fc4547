"""Pipelines: a schedule of one's own, the split, refusals. Loss in chunks: the same losses and gradients as whole, and
less at once."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmm.errors import ConfigError, LayoutError
from mmm.layout import PADDING
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.model import ViT
from mmm.models.vit.plan import vit_plan
from mmm.nn import weights
from mmm.parallel import Layout, Techniques, loss_of
from mmm.parallel.memory.chunked_loss import apply_chunked_loss
from mmm.parallel.memory.measure import Peak
from mmm.parallel.plan import Plan
from mmm.parallel.pp.schedules import SCHEDULES, Schedule, check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, part_costs, parts_of, take_stage
from support import anywhere, reference, vision

# 8 parts
DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256)
TEXT = {"deep": DEEP, "text": reference.CONFIG}
PLANS = {"deep": transformer_plan, "text": transformer_plan, "cnn": cnn_plan, "vit": vit_plan}


def build(model: str) -> torch.nn.Module:
    with torch.device("meta"):
        if model in TEXT:
            return Transformer(TEXT[model])
        return vision.build(model)


class ScheduleNoted(ScheduleGPipe):
    """A schedule of one's own: PyTorch's, made with the micro-batches noted."""

    made: ClassVar[list[int]] = []

    def __init__(self, stage, microbatches, **options):
        super().__init__(stage, microbatches, **options)
        self.made.append(microbatches)


def train_by_own(rank):
    with patch.dict(SCHEDULES, {"Own": Schedule(schedule_class=ScheduleNoted)}):
        trained = anywhere.train(rank, Layout(pp=2, dp_shard=1), {}, accumulate=4, schedule="Own")
    assert ScheduleNoted.made == [4]
    return trained


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
        costs_of_ranks = [sum(costs[i] for i in held) for held in got]
        assert (max(costs_of_ranks), sum(x * x for x in costs_of_ranks)) == best


def test_costs_are_counted():
    """A matrix costs 2 · tokens · rows · columns, a lookup nothing; the output layer keeps layers out of its stage."""
    config = replace(DEEP, vocab_size=2048)
    with torch.device("meta"):
        model = Transformer(config)
        tokens = torch.zeros(2, 16, dtype=torch.int64)
    parts = parts_of(model, transformer_plan())
    assert parts == [("tok_embeddings",), *[(f"layers.{i}",) for i in range(6)], ("norm", "output")]
    costs = part_costs(model, parts, tokens)
    matrices = sum(p.numel() for p in model.layers["0"].parameters() if p.ndim == 2)
    assert costs[0] == 0
    assert costs[-1] == 2 * 32 * 32 * 2048
    # Q kᵀ and its product with v.
    assert costs[1] == 2 * 32 * matrices + 2 * 2 * (2 * 4 * 16 * 16 * 8)
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
    full = build(model)
    plan = PLANS[model]()
    parts = parts_of(full, plan)
    stages = [take_stage(full, parts, held) for held in balance_stages([1] * len(parts), len(parts))]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in full.named_parameters()]
    if model in TEXT:
        inputs = reference.tokens().batch(0, 2, 0, 2).inputs
    else:
        inputs, _ = vision.batch(model, 0)
    real = (Transformer(TEXT[model]) if model in TEXT else vision.build(model)).double()
    x = inputs
    for held in balance_stages([1] * len(parts), len(parts)):
        x = take_stage(real, parts, held)(x)
    torch.testing.assert_close(x, real(inputs), rtol=0, atol=0)


def test_a_plan_that_forgets_parameters():
    with pytest.raises(LayoutError, match=r"2 parameters \(fc2\.weight first\) into no pipeline stage"):
        parts_of(build("cnn"), Plan(tensor={}, fsdp_units=(), stages=("conv1", "conv2", "fc1")))


def refusal(schedule="1F1B", pp=2, microbatches=8, batch=16, parts=6, per_rank=None, dtype="", **fields) -> str:
    techniques = Techniques(schedule=schedule, microbatches=microbatches, stages_per_rank=per_rank, **fields)
    with pytest.raises((LayoutError, ConfigError)) as caught:
        check_pipeline(Layout(pp=pp, dp_shard=1), techniques, batch, parts, dtype)
    return str(caught.value)


def test_refusals():
    assert "one of GPipe, 1F1B" in refusal("1f1b")
    assert "pp 1" in refusal(pp=1)
    assert "stages_per_rank 3: ZBVZeroBubble" in refusal("ZBVZeroBubble", per_rank=3)
    assert "stages_per_rank 1: LoopedBFS" in refusal("LoopedBFS", per_rank=1)
    text = refusal("Interleaved1F1B", pp=4)
    assert "8 stages" in text
    assert "6 parts" in text
    assert "1F1B with pp 4" in refusal(pp=4, microbatches=2)
    assert "5 equal parts" in refusal(microbatches=5)
    assert "a multiple of pp 2" in refusal("Interleaved1F1B", microbatches=3, batch=12)
    assert "DualPipeV with pp 2" in refusal("DualPipeV", microbatches=2)
    assert "microbatches 0" in refusal("GPipe", microbatches=0)
    assert "compile" in refusal("ZBVZeroBubble", compile=True)
    # PyTorch returns a saved tensor only once, and a backward in two parts would ask twice.
    for name, schedule in SCHEDULES.items():
        if schedule.splits:
            assert f"selective with {name}" in refusal(name, checkpointing="selective")
    assert "use bf16 or fp32" in refusal(dtype="fp16")
    two = Layout(pp=2, dp_shard=1)
    interleaved = Techniques(schedule="Interleaved1F1B", microbatches=4)
    assert check_pipeline(two, interleaved, 16, 6) == (2, 4)
    assert check_pipeline(two, replace(interleaved, stages_per_rank=3), 16, 6) == (3, 4)
    assert check_pipeline(two, Techniques(microbatches=8, compile=True), 16, 6) == (1, 8)
    # the fewest
    assert check_pipeline(two, Techniques(schedule="DualPipeV"), 16, 6) == (2, 4)


def test_where_stages_lie():
    assert [stages_of(r, 2, "Interleaved1F1B", 3) for r in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of(r, 3, "ZBVZeroBubble", 2) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]


CPU = torch.device("cpu")
F64 = torch.float64
SEQ, VOCAB = 48, 2048
# Its logits are larger than anything else.
LARGE = TransformerConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=512, vocab_size=VOCAB)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.bytes = max(self.bytes, local.nbytes)
        return out


def large_model(chunks: int):
    model = Transformer(LARGE).double()
    weights.initialize(model, reference.SEED)
    apply_chunked_loss(model, transformer_plan(), chunks, F64)
    rng = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (2, SEQ + 1), generator=rng)
    return model, rows[:, :-1], rows[:, 1:]


def one_step(chunks: int):
    """Loss, gradients, the largest tensor and the peak of a step in bytes."""
    model, inputs, targets = large_model(chunks)
    loss_fn = loss_of(model)
    with Largest() as largest:
        loss = loss_fn(model(inputs), targets, targets.numel())
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with Peak(CPU, model) as peak:
        loss_fn(model(inputs), targets, targets.numel()).backward()
    return loss.item(), gradients, largest.bytes, peak.bytes


# bytes
LOGITS = 2 * SEQ * VOCAB * 8


def test_the_whole_never_exists():
    """The largest tensor shrinks with the pieces, and so does the peak; unsharded weights are smaller than a chunk."""
    plain_loss, plain, largest, peak = one_step(1)
    assert largest >= LOGITS
    assert peak > LOGITS
    loss, gradients, piece, less = one_step(6)
    assert loss == pytest.approx(plain_loss, rel=1e-12)
    assert gradients.keys() == plain.keys()
    for name, gradient in plain.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-11 * gradient.abs().max(), name
    # Of a chunk, of the hidden layer, and of the output matrix: bytes.
    hidden = 2 * SEQ * LARGE.hidden_dim * 8
    matrix = 8 * LARGE.vocab_size * LARGE.dim
    assert piece <= max(LOGITS / 6, hidden, matrix)
    # The peak has the logits of one chunk of six.
    assert less < peak - 0.8 * LOGITS


def test_targets_that_are_none():
    """Whether full logits or in chunks, what has no target counts for nothing: loss and gradients of the others."""
    results = []
    for chunks in (1, 5):
        model, inputs, targets = large_model(chunks)
        targets = targets.clone()
        # 28 of the 96 targets count for nothing.
        targets[0, 5:30] = PADDING
        targets[1, -3:] = PADDING
        loss = loss_of(model)(model(inputs), targets, 68)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for full, chunked in zip(*results, strict=True):
        assert (chunked - full).abs().max() <= 1e-12 * full.abs().max()
    model, inputs, targets = large_model(1)
    # What is left of each row.
    real = [(0, slice(0, 5)), (0, slice(30, None)), (1, slice(0, -3))]
    parts = [torch.nn.functional.cross_entropy(model(inputs)[place], targets[place], reduction="sum") for place in real]
    assert sum(parts).item() / 68 == pytest.approx(results[0][0].item(), rel=1e-12)


# Layouts on which the loss is computed in chunks.
LAYOUTS = [
    (Layout(dp_shard=2), {"accumulate": 2}),
    (Layout(dp_shard=1, tp=2), {}),
]
LONG = [
    (Layout(dp_shard=1, cp=2), {}),
    (Layout(dp_shard=2, tp=2), {}),
    (Layout(dp_shard=1, cp=2, tp=2), {}),
    (Layout(pp=2, dp_shard=1, tp=2), {"accumulate": 4}),
]


@pytest.mark.parametrize(
    ("layout", "techniques"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
def test_same_as_whole(run_on_ranks, layout, techniques):
    ranks = run_on_ranks(train, layout.ranks, layout, {"loss_chunks": 3}, techniques)
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2))


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


@pytest.mark.parametrize("technique", ["ddp", pytest.param("zero1", marks=pytest.mark.long), "zero2"])
def test_copies(run_on_ranks, technique):
    pieces = {"loss_chunks": 3, "data_parallel": technique}
    ranks = run_on_ranks(train, 2, Layout(dp_shard=2), pieces, {"accumulate": 2})
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2))


def test_a_vocabulary_that_tp_does_not_divide(run_on_ranks):
    config = TransformerConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=48, vocab_size=259)
    ranks = run_on_ranks(train, 4, Layout(dp_shard=1, tp=4), {"loss_chunks": 3}, {"config": config})
    anywhere.assert_same(ranks, reference.train("sgd", F64, 2, config))


# ---- what is refused


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: apply_chunked_loss(ViT(vision.CONFIGS["vit"]), vit_plan(), 2, F64), "2: .* names no output matrix"),
        (lambda: apply_chunked_loss(Transformer(LARGE), transformer_plan(), 0, F64), "loss_chunks 0"),
    ],
)
def test_refused(refused, message):
    with pytest.raises(ConfigError, match=message):
        refused()
