"""Modules that every rank of tp has: those whose gradients are partial sums are added up, or refused by name."""

import pytest
import torch

from mmm.models.qwen3.definition import MODEL, SMALL
from mmm.nn import weights
from mmm.parallel import Layout, build_mesh, materialize, parallelize
from support.own_model import CPU, FP64


def gradients(rank, layout, fields):
    """After two micro-batches: how far each gradient is off from one device's."""
    plain = MODEL.build(SMALL).double()
    weights.initialize(plain, 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(SMALL.vocab_size, (8, 32), generator=generator)
    plain(x).square().sum().backward()
    model = MODEL.build(SMALL)
    mesh = build_mesh(layout, "cpu")
    model = parallelize(model, mesh, MODEL.plan(SMALL), FP64, **fields)
    materialize(model, CPU, 0)
    # The samples of this dp coordinate.
    size = 8 // layout.dp
    first = layout.dp_coordinate(rank.rank) * size
    for micro_batch in x[first : first + size].chunk(2):
        model(micro_batch).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    # A number for each channel of a head: all heads share them, on whichever rank they are.
    assert model.layers["0"].attention.q_norm.weight.grad.full_tensor().shape == (16,)
    off = {}
    for wrapped_name, parameter in model.named_parameters():
        name = wrapped_name.replace("_checkpoint_wrapped_module.", "")
        difference = (parameter.grad.full_tensor() - expected[name]).abs().max()
        off[name] = (difference / expected[name].abs().max()).item()
    return off


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (Layout(dp_shard=1, tp=2), {}),
        pytest.param(Layout(dp_shard=2, tp=2), {"checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, tp=2), {"reshard_after_forward": "always"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_partial_gradients_are_added_up(run_on_ranks, layout, fields):
    for off in run_on_ranks(gradients, layout.ranks, layout, fields):
        assert len(off) == 68
        assert max(off.values()) < 1e-14, off
