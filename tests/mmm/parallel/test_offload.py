"""Parts of a model on the host: the same losses, gradients and norm."""

import pytest
import torch

from mmm.errors import ConfigError
from mmm.models.transformer import Transformer
from mmm.parallel import Layout, apply, build_mesh, materialize
from mmm.parallel.memory.offload import check_offload
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from support import anywhere, reference

CPU = torch.device("cpu")
F64 = torch.float64


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        (Layout(dp_shard=2), {"data_parallel": "fsdp", "loss_chunks": 2}),
        (Layout(dp_shard=2), {"data_parallel": "zero2"}),
        pytest.param(Layout(dp_shard=2, tp=2), {}, marks=pytest.mark.long),
        pytest.param(Layout(dp_replicate=2, dp_shard=2), {"data_parallel": "hsdp"}, marks=pytest.mark.long),
        pytest.param(Layout(pp=2, dp_shard=2), {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_same_as_without(run_on_ranks, layout, pieces):
    batch = 6 if layout.ranks == 3 else 8
    techniques = {"accumulate": 2, "steps": 3, "optimizer": "adamw", "global_batch": batch}
    ranks = run_on_ranks(train, layout.ranks, layout, {**pieces, "offload": True}, techniques)
    anywhere.assert_same(ranks, reference.train("adamw", F64, 3, reference.CONFIG, batch))


def loaded(rank):
    """Whether weights that are loaded reach the shards on the host."""
    mesh = build_mesh(Layout(dp_shard=2), "cpu")
    with torch.device("meta"):
        model = Transformer(reference.CONFIG)
    precision = Precision("fp64", F64, F64)
    model = apply(model, mesh, transformer_plan(), precision, data_parallel="zero2", offload=True)
    materialize(model, CPU, reference.SEED)
    one = model.sharded["layers.0.attention.wq.weight"]
    before = one.host.clone()
    model.module.load_state_dict({name: p.detach() * 2 for name, p in model.module.state_dict().items()})
    assert one.host.data_ptr() != one.memory[one.rows].data_ptr()
    return torch.equal(one.host, one.memory[one.rows]) and torch.equal(one.host, before * 2)


def test_what_is_loaded_reaches_the_host(run_on_ranks):
    assert run_on_ranks(loaded, 2) == [True, True]


def test_refused():
    with pytest.raises(ConfigError, match=r"zero1, zero2"):
        check_offload("ddp")
    with pytest.raises(ConfigError, match=r"fp16"):
        check_offload("fsdp", "fp16")
