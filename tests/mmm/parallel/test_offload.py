"""Parts of a model on the host: the same losses, gradients and norm."""

import pytest
import torch

from mmm.errors import ConfigError
from mmm.parallel import Layout
from mmm.parallel.dp.data_parallel import check_offload
from support import anywhere, reference

F64 = torch.float64


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        (Layout(dp_shard=2), {"data_parallel": "fsdp", "loss_chunks": 2}),
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


def test_refused():
    for technique in ("ddp", "zero1", "zero2"):
        with pytest.raises(ConfigError, match=f"offload with {technique}: .*use fsdp"):
            check_offload(technique)
    with pytest.raises(ConfigError, match=r"fp16"):
        check_offload("fsdp", "fp16")
