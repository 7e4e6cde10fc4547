"""Bytes that a rank sends in a step: counted at the process groups, beside the formula of its layout."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.parallel import Layout, Techniques, build_mesh, cross_entropy, materialize, parallelize, sync_gradients
from mmm.parallel.partition import Partition
from mmm.parallel.plan import Plan
from mmm.parallel.pp.pipeline import Pipeline
from mmm.parallel.pp.schedules import check_pipeline, stages_of
from mmm.parallel.pp.stages import balance_stages, parts_of, take_stage
from mmm.runtime.device import Precision
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm.traffic.operators import READERS
from mmm_verify.torch_private import clear_sharding_cache
from support import reference, vision
from support.clock import PATIENCE
from support.parity_models import lora
from support.shards import shard_batch

CPU = torch.device("cpu")
FP32 = Precision("fp32", torch.float32, torch.float32)
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
# Two layers, and six for pipelines.
TEXT = TransformerConfig(dim=32, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=48, vocab_size=256)
DEEP = TransformerConfig(dim=32, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=48, vocab_size=256)
# Two ranks of tp 4 share a key/value head, and gather it.
TEXTS = {"text": TEXT, "text, shared heads": replace(TEXT, n_kv_heads=2), "deep text": DEEP}


def build(kind: str) -> tuple[torch.nn.Module, Plan]:
    """The model without memory, and its plan."""
    with torch.device("meta"):
        if kind == "lora":
            return lora.LoRATransformer(TEXT), lora.lora_plan()
        if kind in TEXTS:
            return Transformer(TEXTS[kind]), transformer_plan(TEXTS[kind])
        return vision.build(kind), cnn_plan() if kind == "cnn" else vit_plan()


def sample(kind: str, layout: Layout, rank: int):
    """Inputs, targets, count, and what forward takes besides, of this rank."""
    first = layout.dp_coordinate(rank)
    if kind not in (*TEXTS, "lora"):
        size = vision.GLOBAL_BATCH // layout.dp
        images, classes = (t[first * size : (first + 1) * size] for t in vision.batch(kind, 0))
        return images.float(), classes, vision.GLOBAL_BATCH, ()
    size = reference.GLOBAL_BATCH // layout.dp
    full = reference.tokens().batch(0, reference.GLOBAL_BATCH, first * size, size)
    shard, positions = shard_batch(full, layout.coordinates(rank)["cp"], layout.cp)
    return shard.inputs, shard.targets, shard.count, (positions,)


def one_step(rank, kind, layout, technique, cp_style="ring", precision=FP32, microbatches=1, bug=""):
    """Counted and expected bytes of the third step, by axis; and what was sent in all."""
    # The ranks have had other process groups before: DTensor keeps what it has worked out for meshes that were like
    # this one, and with it the names of their groups, which are gone.
    clear_sharding_cache()
    layout = layout.fit(rank.world_size)
    model, plan = build(kind)
    mesh = build_mesh(layout, "cpu")
    inputs, targets, count, more = sample(kind, layout, rank.rank)
    ulysses = 2 if cp_style == "usp" else None
    techniques = Techniques(data_parallel=technique, cp_style=cp_style, ulysses=ulysses)
    partition = Partition([], [], [], microbatches)
    sizes = {"batch": len(inputs), "seq_length": reference.SEQ, "precision": precision}
    expected = expected_traffic(model, plan, layout, techniques, partition, **sizes)
    model = parallelize(model, mesh, plan, precision, techniques)
    materialize(model, CPU, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> float:
        total = 0.0
        for i, (x, y) in enumerate(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)):
            sync_gradients(model, i == microbatches - 1)
            with loss_parallel():
                loss = cross_entropy(model(x, *more), y, count)
                loss.backward()
            total += (loss.to_local() if isinstance(loss, DTensor) else loss).item()
        if bug == "one more all-gather":
            weight = next(model.parameters())
            weight.detach().full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        return total

    plain = step()
    # In its second step DDP says how it has packed its gradients.
    assert step() == plain
    with count_traffic(mesh) as traffic:
        counted = step()
    # lr is 0.
    assert counted == plain
    assert step() == plain
    return traffic.by_axis, expected, traffic.sent


LAYOUTS = {
    "ddp": ("text", Layout(), "ddp"),
    "ddp, 3 micro-batches": ("cnn", Layout(), "ddp", "ring", FP32, 3),
    "ddp, frozen but for LoRA": ("lora", Layout(), "ddp"),
    "zero1": ("text", Layout(), "zero1"),
    "zero2": ("text", Layout(), "zero2"),
    "fsdp": ("text", Layout(), "fsdp"),
    "fsdp, bf16": ("text", Layout(), "fsdp", "ring", BF16),
    "fsdp, 2 micro-batches": ("text", Layout(), "fsdp", "ring", FP32, 2),
    "hsdp": ("text", Layout(dp_replicate=2), "hsdp"),
    "tp with the sequence sharded": ("text", Layout(tp=4), "fsdp"),
    "tp, shared key/value heads": ("text, shared heads", Layout(tp=4), "fsdp"),
    "tp of the ViT": ("vit", Layout(tp=4), "fsdp"),
    "tp of the CNN": ("cnn", Layout(tp=4), "fsdp"),
    "cp, ring": ("text", Layout(cp=4), "fsdp"),
    "cp, ulysses": ("text", Layout(cp=4), "fsdp", "ulysses"),
    "cp, usp": ("text", Layout(cp=4), "fsdp", "usp"),
    "fsdp × tp": ("text", Layout(tp=2), "fsdp"),
    "fsdp × tp, 2 micro-batches": ("text", Layout(tp=2), "fsdp", "ring", FP32, 2),
    "fsdp × tp, bf16": ("text", Layout(tp=2), "fsdp", "ring", BF16),
    "fsdp × cp, ring": ("text", Layout(cp=2), "fsdp"),
    "cp × tp, ring": ("text", Layout(cp=2, tp=2), "fsdp"),
    "zero1 × tp": ("text", Layout(tp=2), "zero1"),
    "zero1 × tp, 2 micro-batches": ("text", Layout(tp=2), "zero1", "ring", FP32, 2),
    "zero1 × tp, bf16": ("text", Layout(tp=2), "zero1", "ring", BF16),
    "zero1 × cp, bf16": ("text", Layout(cp=2), "zero1", "ring", BF16),
    "zero1 × cp, ulysses": ("text", Layout(cp=2), "zero1", "ulysses"),
    "zero1 × tp of the ViT, bf16": ("vit", Layout(tp=2), "zero1", "ring", BF16),
    "zero1 × tp of the CNN, bf16": ("cnn", Layout(tp=2), "zero1", "ring", BF16),
    "zero2 × cp, ring": ("text", Layout(cp=2), "zero2"),
    "cp × tp, ulysses": ("text", Layout(cp=2, tp=2), "fsdp", "ulysses"),
}


def close(counted: dict[str, float], expected: dict[str, float]) -> None:
    assert {axis for axis, sent in counted.items() if sent} == set(expected)
    for axis, count in expected.items():
        assert counted[axis] == pytest.approx(count, rel=0.005), axis


QUICK = ("ddp", "ddp, frozen but for LoRA", "fsdp", "tp with the sequence sharded", "cp, ring")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.long) for c in LAYOUTS])
def test_counted_is_the_formula(run_on_ranks, case):
    for by_axis, expected, sent in run_on_ranks(one_step, 4, *LAYOUTS[case]):
        close(by_axis, expected)
        assert sent == pytest.approx(sum(expected.values()), rel=0.005)


def test_one_more_all_gather_is_seen(run_on_ranks):
    kind, layout, technique = LAYOUTS["fsdp"]
    bug = "one more all-gather"
    for by_axis, expected, _ in run_on_ranks(one_step, 4, kind, layout, technique, "ring", FP32, 1, bug):
        with pytest.raises(AssertionError, match="dp_shard"):
            close(by_axis, expected)
        weight = 4 * TEXT.vocab_size * TEXT.dim
        assert by_axis["dp_shard"] - expected["dp_shard"] == pytest.approx(0.75 * weight, rel=0.01)


def pipeline_steps(rank, layout, schedule, microbatches):
    clear_sharding_cache()
    layout = layout.fit(rank.world_size)
    full, plan = build("deep text")
    mesh = build_mesh(layout, "cpu")
    parts = parts_of(full, plan)
    inputs, targets, count, (positions,) = sample("text", layout, rank.rank)
    techniques = Techniques(schedule=schedule, microbatches=microbatches)
    per_rank, _ = check_pipeline(layout, techniques, len(inputs), len(parts))
    cuts = balance_stages([1.0] * len(parts), layout.pp * per_rank)
    own = stages_of(layout.coordinates(rank.rank)["pp"], layout.pp, schedule, per_rank)
    stages = {n: take_stage(full, parts, cuts[n]) for n in own}
    partition = Partition(parts, [], cuts, microbatches)
    sizes = {"batch": len(inputs), "seq_length": reference.SEQ, "precision": FP32}
    expected = expected_traffic(full, plan, layout, Techniques(), partition, own, **sizes)
    for stage in stages.values():
        parallelize(stage, mesh, plan, FP32)
        materialize(stage, CPU, 1)
    pipeline = Pipeline(
        stages,
        len(cuts),
        mesh,
        schedule=schedule,
        microbatches=microbatches,
        device=CPU,
        loss=lambda output, targets: cross_entropy(output, targets, count),
    )
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    # Weights do not change, but FSDP has to take them for new ones.
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    losses, counted = [], []
    for step in range(3):
        optimizer.step()
        with loss_parallel():
            # Sends shapes too.
            if step == 0:
                losses.append(pipeline.step(inputs, targets, positions=positions).item())
                continue
            with count_traffic(mesh) as traffic:
                losses.append(pipeline.step(inputs, targets, positions=positions).item())
            counted.append(traffic.by_axis)
    assert losses == [losses[0]] * 3
    assert counted[0] == counted[1]
    return counted[0], expected


# Schedules whose messages differ.
PIPELINES = [
    (Layout(pp=4), "1F1B", 8),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            (Layout(pp=4), "GPipe", 4),
            (Layout(pp=2), "1F1B", 4),
            (Layout(pp=2), "ZBVZeroBubble", 2),
            (Layout(pp=4), "LoopedBFS", 4),
            (Layout(pp=2), "DualPipeV", 4),
            (Layout(pp=2, tp=2), "Interleaved1F1B", 4),
            (Layout(pp=2, tp=2), "InterleavedZeroBubble", 4),
            (Layout(pp=2, tp=2), "1F1B", 4),
            (Layout(pp=2, cp=2), "1F1B", 4),
        )
    ),
]


@pytest.mark.parametrize(("layout", "schedule", "microbatches"), PIPELINES, ids=str)
def test_pipelines(run_on_ranks, layout, schedule, microbatches):
    for by_axis, expected in run_on_ranks(pipeline_steps, 4, layout, schedule, microbatches):
        close(by_axis, expected)


def meshes(rank):
    mesh = build_mesh(Layout(cp=2, dp_shard=2), "cpu")
    with count_traffic(mesh) as traffic:
        dist.all_reduce(torch.zeros(4), group=mesh["dp_shard_cp"].get_group())
    return traffic.by_axis, traffic.table()


def test_joined_axes_have_their_own_name(run_on_ranks):
    by_axis, table = run_on_ranks(meshes, 4)[0]
    assert by_axis == {"dp_shard_cp": 24}
    assert table.splitlines()[1].split() == ["dp_shard_cp", "all_reduce", "1", "16", "24"]


def compiled(rank):
    mesh = build_mesh(Layout().fit(2), "cpu")
    group = mesh["dp_shard"].get_group()
    function = torch.compile(lambda x: funcol.all_reduce(x, "sum", group).sum())
    function(torch.ones(100))
    with count_traffic(mesh) as traffic:
        total = function(torch.ones(100))
    return traffic.by_axis, total.item()


@pytest.mark.long
def test_what_a_compiled_function_sends(run_on_ranks):
    assert run_on_ranks(compiled, 2, timeout=PATIENCE) == [({"dp_shard": 400}, 200.0)] * 2


def test_an_unknown_operator_is_an_error(run_on_ranks):
    run_on_ranks(unknown, 2)


def unknown(rank):
    with mock.patch.dict(READERS), count_traffic():
        del READERS["allreduce"]
        with pytest.raises(RuntimeError, match=r"allreduce_.* does not know what it sends"):
            dist.all_reduce(torch.ones(1))
    dist.barrier()
