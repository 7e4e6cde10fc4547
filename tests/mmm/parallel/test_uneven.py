"""What does not divide evenly: works like plain PyTorch, or is refused with the numbers and what to change."""

from dataclasses import replace

import pytest
import torch

from mmm.errors import LayoutError
from mmm.models.definition import check_sizes
from mmm.models.llama.model import TransformerConfig
from mmm.parallel import Layout
from support import anywhere, reference

F64 = torch.float64
# 6 heads, which tp 3 divides; 5 layers, which pp 3 does not; 30 tokens, which 2 · cp 3 divides
THREE = TransformerConfig(dim=48, n_layers=5, n_heads=6, n_kv_heads=3, ffn_dim=60, vocab_size=259)
SMALL = replace(reference.CONFIG, n_layers=1)


def train(rank, layout, pieces, techniques):
    return anywhere.train(rank, layout, pieces, **techniques)


def check(run_on_ranks, layout, config, techniques=None, pieces=None):
    techniques = {"config": config, "steps": 2, **(techniques or {})}
    ranks = run_on_ranks(train, layout.ranks, layout, pieces or {}, techniques)
    # The reference sees the same samples.
    sizes = (techniques.get("global_batch", reference.GLOBAL_BATCH), techniques.get("seq", reference.SEQ))
    anywhere.assert_same(ranks, reference.train("sgd", F64, techniques["steps"], config, *sizes))


# Sizes that the ranks do not divide.
ODD = [
    (Layout(dp_shard=3), {}),
]
MORE = [
    (Layout(pp=3, dp_shard=1), {"accumulate": 3}),
    (Layout(dp_shard=1, tp=3), {}),
    (Layout(dp_shard=1, cp=3), {}),
    (Layout(dp_shard=5), {"global_batch": 5}),
    (Layout(dp_shard=3, tp=2), {"config": replace(THREE, n_kv_heads=2)}),
    (Layout(dp_replicate=3, dp_shard=2), {}),
    (Layout(pp=2, dp_shard=1, tp=3), {"accumulate": 2}),
]


@pytest.mark.parametrize(
    ("layout", "techniques"), [*ODD, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)], ids=str
)
def test_odd_ranks(run_on_ranks, layout, techniques):
    techniques = {"global_batch": 6, "seq": 30, **techniques}
    check(run_on_ranks, layout, techniques.pop("config", THREE), techniques)


# More ranks of tp than heads of keys and values.
SHARED = [
    (Layout(dp_shard=2, tp=2), 1, {}),
    (Layout(dp_shard=1, cp=2, tp=2), 1, {"cp_style": "ring"}),
    (Layout(dp_shard=1, cp=2, tp=2), 1, {"cp_style": "ulysses"}),
    (Layout(pp=2, dp_shard=1, tp=2), 1, {}),
    (Layout(dp_shard=1, tp=4), 1, {"checkpointing": "full"}),
]


@pytest.mark.parametrize(
    ("layout", "kv_heads", "pieces"),
    [(Layout(dp_shard=1, tp=4), 2, {}), *(pytest.param(*case, marks=pytest.mark.long) for case in SHARED)],
    ids=str,
)
def test_key_value_heads_that_ranks_share(run_on_ranks, layout, kv_heads, pieces):
    config = replace(SMALL, n_layers=2 if layout.pp > 1 else 1, n_kv_heads=kv_heads)
    check(run_on_ranks, layout, config, {"accumulate": layout.pp}, pieces)


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        ({"n_heads": 4, "n_kv_heads": 4, "dim": 64}, 8, r"n_heads 4"),
        ({"n_heads": 12, "n_kv_heads": 6, "dim": 96}, 4, r"n_kv_heads 6"),
        ({"n_heads": 12, "n_kv_heads": 2, "dim": 96}, 6, r"n_kv_heads 2"),
    ],
)
def test_refused(config, tp, message):
    with pytest.raises(LayoutError, match=message):
        check_sizes(replace(TransformerConfig(), **config), Layout(dp_shard=1, tp=tp), 48)
