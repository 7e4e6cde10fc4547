"""A training goes on from ranks that have rows of each field to ranks that have samples of the batch, and back."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from mmm.layout import PADDING, Layout
from mmm.nn import init
from mmm.parallel.cp.space.strips import own_rows
from support.own_model import build, furthest, own, parameters
from support.parity_models import fno, unet

RANKS = 2
LAYOUTS = (Layout(dp_shard=1, cp=RANKS), Layout(dp_shard=RANKS), Layout(dp_shard=1, cp=RANKS))


def step(parity, model, fields, targets, count):
    """A step of SGD, on what a rank has of a batch."""
    loss = parity.loss(model(fields), targets) / count
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def trained(rank, folder, parity):
    """Three steps, each on a layout of its own: how far the weights are from plain PyTorch's."""
    net = parity.model()
    init.convert(net, torch.float64)
    for index, layout in enumerate(LAYOUTS):
        fields, targets = parity.batch(4, torch.Generator().manual_seed(index))
        count = (targets != PADDING).sum()
        model = build(parity.model, layout, parity.plan(), cp_style="space")
        state = get_model_state_dict(model)
        if index:
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state)
        else:
            # Buffers of norms are as they begin.
            net.load_state_dict(parameters(model), strict=False)
        if layout.cp > 1:
            own_part = [own_rows(field, RANKS, rank.rank) for field in (fields, targets)]
        else:
            own_part = [own(field, rank.rank, RANKS) for field in (fields, targets)]
        step(parity, model, *own_part, count)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        net.zero_grad()
        step(parity, net, fields, targets, count)
    return furthest(parameters(model), dict(net.named_parameters()))


@pytest.mark.parametrize("parity", [fno.PARITY, pytest.param(unet.PARITY, marks=pytest.mark.long)], ids=["fno", "unet"])
def test_weights_that_belong_to_the_rows_of_a_rank(run_on_ranks, tmp_path, parity):
    """Strips, samples, strips: the checkpoints have full parameters, whatever splits the fields."""
    for error in run_on_ranks(trained, RANKS, str(tmp_path), parity):
        assert error <= 1e-12
