"""Lanes along tp: the same bits on every number of tp ranks, right numbers, and mistakes that are noticed."""

from __future__ import annotations

import hashlib
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from mmm.errors import ConfigError, LayoutError
from mmm.layout import Layout, Techniques
from mmm.models.definition import find
from mmm.models.gpt.model import GPTConfig
from mmm.models.llama.model import TransformerConfig
from mmm.models.qwen3.model import Qwen3Config
from mmm.models.vit.model import ViTConfig
from mmm.parallel import apply, build_mesh, materialize
from mmm.parallel.exact import lanes, tensor
from mmm.parallel.exact.lanes import GatherLanes, computing_with
from mmm.parallel.generate import check_generation
from mmm.parallel.partition import partition_model
from mmm.runtime.device import choose_precision
from support.own_model import CPU, gradients

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
same_bits = importlib.import_module("same_bits")

# 20 hidden units a lane: no multiple of what a vector register has.
LLAMA = TransformerConfig(dim=48, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=80, vocab_size=96)
GPT = GPTConfig(dim=48, n_layers=1, n_heads=4, vocab_size=96, block_size=32, bias=True)
QWEN3 = Qwen3Config(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=8, vocab_size=96)
VIT = ViTConfig(image_size=8, patch_size=4, classes=4, dim=32, n_layers=1, n_heads=4)
SIZES = {"llama": LLAMA, "gpt": GPT, "qwen3": QWEN3, "vit": VIT}
SHORT = same_bits.Case(exact="1.1.4", steps=2, sizes=LLAMA)
TP2 = Layout(dp_shard=1, tp=2)


def test_one_and_two_ranks(run_on_ranks):
    one = run_on_ranks(same_bits.train, 1, SHORT)[0]
    two = run_on_ranks(same_bits.train, 2, replace(SHORT, layout=TP2))
    assert [bits.digest for bits in two] == [one.digest] * 2
    # With other lanes the same training has other bits: the lines above are not blind.
    assert run_on_ranks(same_bits.train, 1, replace(SHORT, exact="1.1.2"))[0].digest != one.digest


LAYOUTS = [
    TP2,
    Layout(dp_shard=1, tp=4),
    Layout(dp_shard=2, tp=2),
    Layout(pp=2, dp_shard=1, tp=2),
]


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", "gpt", "qwen3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_all_layouts(run_on_ranks, model, dtype):
    sizes = replace(SIZES[model], n_layers=2)
    case = same_bits.Case(model, dtype, "2.1.4", steps=5, sizes=sizes)
    one = run_on_ranks(same_bits.train, 1, case)[0]
    for layout in LAYOUTS:
        if layout.pp > 1 and model != "llama":
            # The embedding is the output matrix as well.
            continue
        results = run_on_ranks(same_bits.train, layout.ranks, replace(case, layout=layout))
        assert results[0].digest == one.digest, str(layout)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.long)])
def test_as_an_ordinary_run(run_on_ranks, model):
    case = same_bits.Case(model, "fp64", "1.1.4", steps=3, sizes=SIZES[model])
    one = run_on_ranks(same_bits.train, 1, case)[0]
    ordinary = run_on_ranks(same_bits.train, 1, replace(case, exact=None))[0]
    assert one.losses == pytest.approx(ordinary.losses, rel=1e-12)
    assert one.norms == pytest.approx(ordinary.norms, rel=1e-12)


def first_gradients(rank, model, layout, exact):
    """The digest of all gradients of a first step, and the gradients. The loss is the sum of the output's squares."""
    torch.set_num_threads(1)
    definition = find(model)
    module, sample = definition.on_meta(SIZES[model], 4, 8)
    precision = choose_precision("fp64", CPU)
    mesh = build_mesh(layout, "cpu")
    module = apply(module, mesh, definition.plan(SIZES[model]), precision, Techniques(exact=exact))
    materialize(module, CPU, 0)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(96, sample.shape, generator=generator)
    if sample.is_floating_point():
        inputs = torch.randn(sample.shape, generator=generator, dtype=torch.float64)
    output = module(inputs)
    output = output.to_local() if hasattr(output, "to_local") else output
    output.square().sum().backward()
    full = gradients(module)
    memory = b"".join(full[name].contiguous().numpy().tobytes() for name in sorted(full))
    return hashlib.sha256(memory).hexdigest(), full


@pytest.mark.parametrize("model", ["llama", "vit", pytest.param("qwen3", marks=pytest.mark.long)])
def test_gradients_of_other_models(run_on_ranks, model):
    """With whole tokens, and with norms inside of attention."""
    digest, one = run_on_ranks(first_gradients, 1, model, Layout(dp_shard=1), "1.1.4")[0]
    for ranks_digest, _ in run_on_ranks(first_gradients, 2, model, TP2, "1.1.4"):
        assert ranks_digest == digest
    _, ordinary = run_on_ranks(first_gradients, 1, model, Layout(dp_shard=1), None)[0]
    for name, gradient in ordinary.items():
        assert torch.allclose(one[name], gradient, rtol=0, atol=1e-12 * gradient.abs().max().item()), name


def one_after_the_other(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def logits_at_once(forward, parts, axis, mesh):
    """One product with the columns of all lanes of a rank."""

    def lane_forward(x):
        inputs = GatherLanes.apply(axis, 1, *tensor.SplitChunks.apply(x, axis.lanes, 1))
        weight = torch.cat([tensors["weight"] for tensors in parts.by_lane()])
        own = functional.linear(inputs[0], weight)
        return own if mesh is None else tensor.DTensor.from_local(own, mesh, [tensor.Shard(-1)])

    return lane_forward


def norms_at_once(forward, parts, axis):
    """A norm of all tokens of a rank."""

    def lane_forward(x):
        with computing_with(parts.owners, parts.by_lane()[0]):
            return forward(x)

    return lane_forward


MISTAKES = {
    "a sum over lanes in another order": (lanes, "sum_near", one_after_the_other),
    "a product with the columns of all lanes": (tensor, "_logits", logits_at_once),
    "a norm of the tokens of all lanes": (tensor, "_by_tokens", norms_at_once),
}


def wrong_gradients(rank, layout, mistake):
    module, name, wrong = MISTAKES[mistake]
    with patch.object(module, name, wrong):
        return first_gradients(rank, "llama", layout, "1.1.4")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(run_on_ranks, mistake):
    digest, one = run_on_ranks(wrong_gradients, 1, Layout(dp_shard=1), mistake)[0]
    ranks_digest, two = run_on_ranks(wrong_gradients, 2, TP2, mistake)[0]
    assert digest != ranks_digest
    # It is only rounding.
    for name, gradient in one.items():
        assert torch.allclose(two[name], gradient, rtol=0, atol=1e-12 * gradient.abs().max().item()), name


def refused(sizes, exact="1.1.4", model="llama", seq=8, **techniques):
    definition = find(model)
    module, sample = definition.on_meta(sizes, 4, seq)
    layout = Layout(dp_shard=1)
    partition_model(module, definition.plan(sizes), layout, Techniques(exact=exact, **techniques), sample, "fp32")


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (LayoutError, "wk: its 2 heads do not divide into 4 lanes", {"sizes": replace(LLAMA, n_kv_heads=2)}),
        (LayoutError, "w1: its 82 .* do not divide into 4 lanes", {"sizes": replace(LLAMA, ffn_dim=82)}),
        (LayoutError, "tok_embeddings: its 97 ", {"sizes": replace(LLAMA, vocab_size=97)}),
        (LayoutError, "n_heads 6 is not divisible", {"sizes": replace(VIT, dim=48, n_heads=6), "model": "vit"}),
        (LayoutError, "seq_length 6", {"sizes": LLAMA, "seq": 6}),
        (LayoutError, "dropout 0.1 has no lanes", {"sizes": replace(GPT, dropout=0.1), "model": "gpt"}),
        (ConfigError, "loss_chunks 2", {"sizes": LLAMA, "loss_chunks": 2}),
        (ConfigError, "give exact 1.2, or 1.1.4", {"sizes": LLAMA, "exact": "1.2.4"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(error, says, arguments):
    with pytest.raises(error, match=says):
        refused(**arguments)


def test_what_is_right_is_not_refused():
    refused(LLAMA)
    refused(replace(LLAMA, n_kv_heads=2), exact="2.1.2")
    refused(VIT, model="vit")


@pytest.mark.parametrize("exact", ["2.2", "2.1.2"])
def test_no_text_is_generated(exact):
    with pytest.raises(ConfigError, match=f"exact {exact}: no text"):
        check_generation(Techniques(exact=exact))
    check_generation(Techniques(exact="2"))
