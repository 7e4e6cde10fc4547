"""An exact run has the same bits on every number of dp and pp ranks; and a run that does not is noticed."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Layout, Techniques
from mmm.models.llama.definition import MODEL
from mmm.models.llama.model import TransformerConfig
from mmm.optim.adamw import make_optimizer
from mmm.parallel import clip, parallel_model
from mmm.parallel.exact import gradients, norm
from mmm.parallel.partition import partition_model

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
same_bits = importlib.import_module("same_bits")
Case = same_bits.Case
SHORT = Case(exact=4, steps=2)
ONE_RANK = Layout(dp_shard=1)
HSDP = {"data_parallel": "hsdp"}


def on_dp(case, ranks):
    return replace(case, layout=Layout(dp_shard=ranks))


def test_one_two_and_four_ranks(run_on_ranks):
    one = run_on_ranks(same_bits.train, 1, SHORT)[0]
    for ranks in (2, 4):
        results = run_on_ranks(same_bits.train, ranks, on_dp(SHORT, ranks))
        # Every rank has the same full weights, losses and norms.
        assert [bits.digest for bits in results] == [one.digest] * ranks


def test_a_pipeline(run_on_ranks):
    one = run_on_ranks(same_bits.train, 1, SHORT)[0]
    piped = replace(SHORT, layout=Layout(pp=2, dp_shard=1))
    assert [bits.digest for bits in run_on_ranks(same_bits.train, 2, piped)] == [one.digest] * 2


def test_the_partition_names_the_bits(run_on_ranks):
    # So the test above is not blind: with other lanes, or as an ordinary run, the same training has other bits.
    digests = set()
    for exact in (4, 2, 1, None):
        digests.add(run_on_ranks(same_bits.train, 1, replace(SHORT, exact=exact))[0].digest)
    # One lane on one rank computes what an ordinary run computes, but for AdamW's kernel and the norm.
    assert len(digests) == 4


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_all_layouts(run_on_ranks, model, dtype):
    one_rank = {}
    for exact, layout, techniques in same_bits.ROWS:
        case = Case(model, dtype, exact, layout, techniques, steps=3)
        if model == "gpt" and layout.pp > 1:
            # Its embedding is its output matrix as well.
            with pytest.raises(LayoutError, match="in several stages"):
                same_bits.partitioned(case)
            continue
        bits = run_on_ranks(same_bits.train, layout.ranks, case)[0]
        assert bits.digest == one_rank.setdefault(exact, bits.digest), str(layout)


@pytest.mark.long
@pytest.mark.parametrize(
    "techniques",
    [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"loss_chunks": 2}, {"reshard_after_forward": "never"}],
    ids=str,
)
def test_techniques(run_on_ranks, techniques):
    case = replace(SHORT, techniques=techniques)
    one = run_on_ranks(same_bits.train, 1, case)[0]
    assert run_on_ranks(same_bits.train, 2, on_dp(case, 2))[0].digest == one.digest


def one_after_the_other(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def in_bf16(terms):
    return one_after_the_other([term.bfloat16() for term in terms]).to(terms[0].dtype)


def train_wrongly(rank, case, module, name, wrong):
    with patch.object(module_of(module), name, wrong):
        return same_bits.train(rank, case)


def module_of(name):
    return {"gradients": gradients, "parallel_model": parallel_model}[name]


def norm_of_shards(gradients, *_):
    """The norm from the sum of each rank's shards, as an ordinary run has it."""
    shards = list(gradients.values())
    return clip._sum_of_squares(shards, clip.local_norms(shards)).sqrt()


# Each is a mistake in one place: where it is, and what stands there instead.
MISTAKES = {
    "one sum over ranks in another order": ("gradients", "sum_far", one_after_the_other),
    "one sum over ranks in bf16": ("gradients", "sum_far", in_bf16),
    "micro-batches in another order": ("gradients", "visiting_order", range),
    "a norm from the ranks' own sums": ("parallel_model", "exact_norm", norm_of_shards),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(run_on_ranks, mistake):
    case = replace(SHORT, exact=8)
    one = run_on_ranks(train_wrongly, 1, case, *MISTAKES[mistake])[0]
    two = run_on_ranks(train_wrongly, 4, on_dp(case, 4), *MISTAKES[mistake])[0]
    assert one.digest != two.digest
    # It is only rounding: no bound on a difference would have found it.
    assert one.losses == pytest.approx(two.losses, rel=1e-2)


def updated(exact, dtype, shard):
    """100,003 weights after three steps of AdamW, in shards of so many elements."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(2, 100_003, generator=generator, dtype=dtype)
    parameters = [piece.clone().requires_grad_() for piece in weights.split(shard)]
    optimizer = make_optimizer("adamw", parameters, 1e-2, exact=exact)
    for _ in range(3):
        for parameter, gradient in zip(parameters, gradients.split(shard), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fused_kernel_is_not_exact(dtype):
    assert torch.equal(updated(True, dtype, 100_003), updated(True, dtype, 37))
    # The ordinary kernel rounds the last elements of a shard, which fill no vector register, otherwise.
    assert not torch.equal(updated(False, dtype, 100_003), updated(False, dtype, 37))


@pytest.mark.parametrize("shape", [(7,), (7, 3), (8, 4), (1, 5), (3, 2, 2), (5, 1)])
def test_norm_is_the_norm(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = norm.exact_norm({"a": gradient}, ["a", "b"], torch.device("cpu"))
    assert exact.item() == pytest.approx(gradient.norm().item(), rel=1e-14)


PP2 = Layout(pp=2, dp_shard=1)


def refused(exact, layout=ONE_RANK, dtype="fp32", experts=0, batch=8, **techniques):
    sizes = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=16, n_experts=experts)
    model, sample = MODEL.on_meta(sizes, batch, 8)
    partition_model(model, MODEL.plan(sizes), layout, Techniques(exact=exact, **techniques), sample, dtype)


@pytest.mark.parametrize(
    ("error", "says", "case"),
    [
        (ConfigError, "exact 3: it must be a power of two", {"exact": 3}),
        (ConfigError, "exact 0", {"exact": 0}),
        (LayoutError, "dp 8 does not divide its 4 lanes", {"exact": 4, "layout": Layout(dp_shard=8)}),
        (
            LayoutError,
            "use cp 1",
            {"exact": 4, "layout": Layout(dp_shard=1, cp=2)},
        ),
        (
            LayoutError,
            "use tp 1",
            {"exact": 4, "layout": Layout(dp_shard=1, tp=2)},
        ),
        (LayoutError, "global batch of 6 samples", {"exact": 4, "batch": 6}),
        (ConfigError, "zero1", {"exact": 4, "data_parallel": "zero1"}),
        (ConfigError, "ddp", {"exact": 4, "data_parallel": "ddp"}),
        (LayoutError, "dp_shard 1", {"exact": 4, "layout": Layout(dp_replicate=2, dp_shard=1), **HSDP}),
        (ConfigError, "microbatches", {"exact": 4, "microbatches": 2}),
        (ConfigError, "experts", {"exact": 4, "experts": 2}),
        (ConfigError, "compile", {"exact": 4, "compile": True}),
        (ConfigError, "offload", {"exact": 4, "offload": True}),
        (ConfigError, "Interleaved1F1B", {"exact": 4, "layout": PP2, "schedule": "Interleaved1F1B"}),
        (LayoutError, "1F1B needs", {"exact": 2, "layout": Layout(pp=2, dp_shard=2)}),
        (ConfigError, "fp16", {"exact": 4, "dtype": "fp16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(error, says, case):
    with pytest.raises(error, match=says):
        refused(**case)


def test_what_is_right_is_not_refused():
    refused(4)
    refused(4, PP2, schedule="GPipe")
    refused(8, Layout(dp_replicate=2, dp_shard=4), **HSDP)
