"""Whole models on products of axes: what is refused before ranks meet, and the imbalance of experts."""

import pytest
import torch

from mmm.errors import LayoutError
from mmm.layout import Techniques
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.vit.plan import vit_plan
from mmm.parallel import Layout, build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from support import reference, vision
from support.own_model import FP64

CPU = torch.device("cpu")
PLANS = {"cnn": cnn_plan, "vit": vit_plan}


@pytest.mark.parametrize(
    ("model", "layout", "techniques", "message"),
    [
        ("cnn", Layout(cp=2, dp_shard=1), Techniques(), "cp 2: an image has no sequence to shard; use cp 1"),
        ("vit", Layout(cp=2, dp_shard=1), Techniques(), "use cp 1"),
        ("cnn", Layout(dp_shard=2), Techniques(microbatches=7), "a batch of 6 .* into 1 to 6 parts"),
        ("cnn", Layout(pp=2, dp_shard=2), Techniques(data_parallel="ddp"), "zero1"),
        ("cnn", Layout(pp=8, dp_shard=1), Techniques(), "8 stages, and the model has 4 parts"),
    ],
)
def test_refused_before_any_process_group(model, layout, techniques, message):
    """`samples` of a step, for one data-parallel coordinate."""
    with torch.device("meta"):
        full = vision.build(model)
        samples = vision.batch(model, 0)[0][: vision.GLOBAL_BATCH // layout.dp].to("meta", torch.float32)
    with pytest.raises(LayoutError, match=message):
        partition_model(full, PLANS[model](), layout, techniques, samples)


def uneven_loads(rank, measured):
    """The imbalance of loads that are set by hand, one layer a stage, and whether pp was asked for it."""
    config = TransformerConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=256, n_experts=3, expert_dim=24)
    layout = Layout(pp=2, dp_shard=1)
    techniques = Techniques()
    plan = transformer_plan()
    with torch.device("meta"):
        model = Transformer(config)
        sample = torch.zeros(4, reference.SEQ, dtype=torch.int64)
    partition = partition_model(model, plan, layout, techniques, sample)
    mesh = build_mesh(layout, "cpu", experts=True)
    made = ParallelModel(model, plan, mesh, FP64, techniques, partition, device=CPU, seed=0)
    for stage in made.modules.values():
        for index, layer in stage.layers.items():
            layer.moe.tokens_per_expert = torch.tensor([[5, 1, 1], [3, 2, 2]][int(index)])
    reduced = []
    original = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **named: (reduced.append(1), original(*args, **named))[1]
    try:
        return made.balance_experts(0.0, measured), len(reduced)
    finally:
        torch.distributed.all_reduce = original


def test_the_imbalance_is_as_on_one_device(run_on_ranks):
    """To the last bit also through a pipeline, and computed only where it is wanted."""
    # over pp
    assert run_on_ranks(uneven_loads, 2, True) == [(15 / 7, 1)] * 2
    assert run_on_ranks(uneven_loads, 2, False) == [(None, 0)] * 2
