"""Which FSDP units stay gathered from forward to backward: as many all-gathers as said, and the same numbers."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from mmm.errors import ConfigError, LayoutError
from mmm.models.cnn.model import CNN
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, Techniques, build_mesh, loss_of, materialize, meta_parameters, parallelize
from mmm.parallel.checks import check_techniques
from mmm.parallel.dp.fsdp import fsdp_units_of
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.run.command_line import configure
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm.trainer import lm
from support import reference
from support.own_model import FP64
from support.parity_models import plain_gpt

CPU = torch.device("cpu")
DP2 = Layout(dp_shard=2)
# Of the reference's Transformer: embedding, two layers, norm and output.
UNITS = 4


def sharded(techniques):
    mesh = build_mesh(DP2, "cpu")
    plan = transformer_plan()
    with torch.device("meta"):
        model = Transformer(reference.CONFIG)
    sizes = {"batch": 1, "seq_length": reference.SEQ, "precision": FP64}
    formula = expected_traffic(model, plan, DP2, Techniques(**techniques), Partition([], [], [], 1), **sizes)
    parallelize(model, mesh, plan, FP64, **techniques)
    materialize(model, CPU, reference.SEED)
    return model, mesh, formula


def gathers(rank, techniques):
    """All-gathers of FSDP in a step; and all its bytes, counted and by the formula."""
    model, mesh, formula = sharded(techniques)
    batch = reference.tokens().batch(0, 2, rank.rank, 1)
    with count_traffic(mesh) as traffic:
        loss_of(model)(model(batch.inputs), batch.targets, batch.count).backward()
    return traffic.entries["dp_shard", "all_gather"].calls, traffic.by_axis, formula


@pytest.mark.parametrize(
    ("techniques", "calls"),
    [
        # The last unit stays gathered for its backward.
        ({}, 2 * UNITS - 1),
        ({"reshard_after_forward": "always"}, 2 * UNITS),
        ({"reshard_after_forward": "never"}, UNITS),
    ],
    ids=str,
)
def test_gathers_and_their_bytes(run_on_ranks, techniques, calls):
    for counted, by_axis, formula in run_on_ranks(gathers, 2, techniques):
        assert counted == calls
        assert by_axis == pytest.approx(formula)


def after_evaluation(rank):
    with torch.device("meta"):
        model = Transformer(reference.CONFIG)
    plan = transformer_plan()
    inputs = reference.tokens().batch(0, 2, rank.rank, 1)
    partition = partition_model(model, plan, DP2, Techniques(), inputs.inputs)
    mesh = build_mesh(DP2, "cpu")
    model = ParallelModel(model, plan, mesh, FP64, Techniques(), partition, device=CPU, seed=reference.SEED)
    model.evaluate(inputs)
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def test_nothing_is_left_gathered_by_an_evaluation(run_on_ranks):
    # Every parameter is a DTensor again.
    assert run_on_ranks(after_evaluation, 2) == [[], []]


def test_a_unit_of_tied_weights_is_the_last():
    with meta_parameters():
        model = plain_gpt.small_model()
    assert fsdp_units_of(model, plain_gpt.plain_gpt_plan())[-1] == [model.tokens, model.norm, model.head]


def test_refused():
    with torch.device("meta"):
        model = CNN()
    with pytest.raises(ConfigError, match="reshard_after_forward"):
        check_techniques(model, cnn_plan(), Layout(dp_shard=1), Techniques(reshard_after_forward="often"))
    techniques = Techniques(reshard_after_forward="never", data_parallel="zero1")
    with pytest.raises(ConfigError, match="reshard_after_forward"):
        check_techniques(model, cnn_plan(), Layout(dp_shard=2), techniques)
    techniques = Techniques(reshard_after_forward="always")
    with pytest.raises(LayoutError, match="reshard_after_forward"):
        check_techniques(model, cnn_plan(), Layout(dp_shard=1, pp=2), techniques)


def test_the_flag():
    assert configure(lm.Config, reshard_after_forward="never").mesh.techniques().reshard_after_forward == "never"
    assert lm.Config().mesh.techniques().reshard_after_forward == "auto"
