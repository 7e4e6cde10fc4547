"""Bytes by axis, by arithmetic on a `ModelSpec`, are those that `expected_traffic` reads from the modules."""

import math
from dataclasses import replace

import pytest
import torch

from mmm.models.gpt import model as gpt
from mmm.models.gpt.plan import gpt_plan
from mmm.models.llama.model import PRESETS, Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.model import PRESETS as VITS
from mmm.models.vit.model import ViT
from mmm.models.vit.plan import vit_plan
from mmm.parallel import Layout, Techniques, partition_model
from mmm.parallel.pp.schedules import stages_of
from mmm.runtime.device import Precision
from mmm.traffic.formulas import expected_traffic
from mmm_lab.planner.memory import MemoryModel
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.network import Group
from mmm_lab.planner.traffic import between_hosts, sent_bytes
from mmm_lab.planner.trial import Trial, full_model, stages_for

BF16 = Precision("bf16", torch.float32, torch.bfloat16)
FP32 = Precision("fp32", torch.float32, torch.float32)
SEQ, BATCH = 64, 8
# Layouts and techniques that send different bytes.
CASES = [
    (Layout(dp_shard=4), {"data_parallel": "ddp"}),
    (Layout(dp_shard=3), {"data_parallel": "zero1"}),
    (Layout(dp_shard=4), {"data_parallel": "zero2"}),
    (Layout(dp_shard=4), {}),
    (Layout(dp_shard=3), {"microbatches": 4}),
    (Layout(dp_shard=4), {"reshard_after_forward": "never", "microbatches": 2}),
    (Layout(dp_replicate=2, dp_shard=2), {"data_parallel": "hsdp"}),
    (Layout(dp_shard=1, tp=4), {}),
    (Layout(dp_shard=2, tp=2), {}),
    (Layout(dp_shard=1, cp=4), {}),
    (Layout(dp_shard=2, cp=2), {"cp_style": "ulysses"}),
    (Layout(dp_shard=1, cp=4), {"cp_style": "usp", "ulysses": 2}),
    (Layout(dp_shard=1, cp=2, tp=2), {}),
    (Layout(dp_shard=2, tp=2), {"data_parallel": "zero1"}),
    (Layout(dp_shard=3, cp=2), {"data_parallel": "zero1"}),
    (Layout(pp=2, dp_shard=2, tp=2), {"data_parallel": "zero1"}),
    (Layout(pp=2, dp_shard=1), {"schedule": "GPipe"}),
    (Layout(pp=2, dp_shard=2), {"schedule": "1F1B"}),
    (Layout(pp=2, dp_shard=1, tp=2), {"schedule": "1F1B"}),
    (Layout(pp=2, dp_shard=1, cp=2), {"schedule": "Interleaved1F1B"}),
    (Layout(pp=2, dp_shard=1), {"schedule": "ZBVZeroBubble"}),
]


def _compare(name, model, plan, sample, layout, techniques, precision, seq):
    spec = read_model(name, {}, max(seq, 1))
    techniques = Techniques(**techniques)
    partition = partition_model(model, plan, layout, techniques, sample)
    memory = MemoryModel(spec, "cpu", precision.name)
    stages = [full_model(spec)]
    if layout.pp > 1:
        stages = stages_for(spec, partition.stages, techniques.schedule, layout.pp)
    for stage in stages:
        own_stages = (
            stages_of(stage.coordinate, layout.pp, techniques.schedule, stage.n_stages) if layout.pp > 1 else (0,)
        )
        expected = expected_traffic(
            model,
            plan,
            layout,
            techniques,
            partition,
            own_stages,
            batch=len(sample),
            seq_length=seq,
            precision=precision,
        )
        planned = replace(techniques, microbatches=partition.microbatches)
        result = sent_bytes(memory, stage, Trial(layout, planned, (stage,), len(sample)))
        # By arithmetic, and by the modules.
        assert result == pytest.approx(expected, rel=1e-12), stage


@pytest.mark.parametrize(("layout", "techniques"), CASES, ids=lambda case: str(case))
@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        ("small", FP32),
        ("medium", BF16),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("small", BF16), ("medium", FP32))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_transformer(preset, layout, techniques, precision):
    config = PRESETS[preset]
    with torch.device("meta"):
        model = Transformer(config)
        sample = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    _compare(preset, model, transformer_plan(config), sample, layout, techniques, precision, SEQ)


def test_more_tp_ranks_than_key_value_heads():
    """A ring of two: keys and values of one head, twice in forward and backward, and their gradients twice."""
    config = PRESETS["debug"]
    layout = Layout(dp_shard=2, cp=2, tp=4)
    assert config.n_kv_heads == 2
    with torch.device("meta"):
        model = Transformer(config)
        sample = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    _compare("debug", model, transformer_plan(config), sample, layout, {}, FP32, SEQ)
    spec = read_model("debug", {}, SEQ)
    stage = full_model(spec)
    sent = sent_bytes(MemoryModel(spec, "cpu", "fp32"), stage, Trial(layout, Techniques(), (stage,), BATCH))
    # Bytes of a layer.
    keys_and_values = 2 * BATCH * SEQ // 2 * config.head_dim * 4
    assert sent["cp"] == config.n_layers * (2 * 1 + 2) * keys_and_values


def test_one_weight_for_embedding_and_output():
    config = PRESETS["gpt2"]
    with torch.device("meta"):
        model = Transformer(config)
        sample = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    plan = transformer_plan(config)
    for layout, techniques in ((Layout(dp_shard=4), {"data_parallel": "ddp"}), (Layout(dp_shard=4), {})):
        _compare("gpt2", model, plan, sample, layout, techniques, FP32, SEQ)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(dp_shard=1, cp=2, tp=2)], ids=str
)
def test_gpt(layout):
    config = replace(gpt.PRESETS["shakespeare-cpu"], block_size=SEQ)
    with torch.device("meta"):
        model = gpt.GPT(config)
        sample = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    _compare("gpt-shakespeare-cpu", model, gpt_plan(), sample, layout, {}, FP32, SEQ)


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2)], ids=str)
def test_vit(layout):
    config = VITS["debug"]
    with torch.device("meta"):
        model = ViT(config)
        sample = torch.zeros(BATCH, config.channels, config.image_size, config.image_size)
    _compare("vit-debug", model, vit_plan(), sample, layout, {}, FP32, 0)


def test_what_leaves_a_host():
    assert between_hosts("tp", 80.0, Group(8, 8, False)) == 0
    # One of eight sends to the next host.
    assert between_hosts("dp_shard", 80.0, Group(64, 8, True)) == 10
    # To 56 of 63 others.
    assert between_hosts("ep", 63.0, Group(64, 8, True)) == 56


def test_gradients_of_experts_are_summed_over_replicas_by_their_shard():
    """Experts are sharded over cp and tp as well as over dp_shard: a rank sums the gradients of that part only."""
    layout = Layout(dp_replicate=2, dp_shard=1, cp=2, tp=2)
    spec = read_model("debug", {"n_experts": 4, "top_k": 2}, SEQ)
    stage = full_model(spec)
    trial = Trial(layout, Techniques(data_parallel="hsdp"), (stage,), 4)
    sent = sent_bytes(MemoryModel(spec, "cpu", "fp32"), stage, trial)
    elements = 0.0
    for kind, count in stage.kinds:
        for matrix in spec.kinds[kind].matrices:
            size = math.prod(matrix.shape)
            if matrix.expert:
                elements += count * size / (layout.dp_shard * layout.cp * layout.tp)
            else:
                of_tp = 1 if matrix.dim is None else layout.tp
                elements += count * size / of_tp / (layout.dp_shard * layout.cp)
    # float32; an all-reduce of 2 ranks sends all of it once
    assert sent["dp_replicate"] == pytest.approx(4 * elements)
