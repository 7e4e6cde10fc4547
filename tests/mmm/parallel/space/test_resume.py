"""A training goes on from ranks that have rows of each field to ranks that have samples of the batch, and back."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from mmm.layout import Layout
from mmm.parallel.cp.space.strips import own_rows
from support.own_model import build, furthest, own, parameters
from support.parity_models.encoder import Encoder, encoder_plan, make_batch, squared_error

RANKS = 2
LAYOUTS = (Layout(dp_shard=1, cp=RANKS), Layout(dp_shard=RANKS), Layout(dp_shard=1, cp=RANKS))


def step(model, fields, targets, count):
    """A step of SGD, on what a rank has of a batch."""
    loss = squared_error(model(fields), targets) / count
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def trained(rank, folder):
    """Three steps, each on a layout of its own: how far the weights are from plain PyTorch's."""
    net = Encoder().double()
    for index, layout in enumerate(LAYOUTS):
        fields, targets = make_batch(4, torch.Generator().manual_seed(index))
        count = targets.numel()
        model = build(Encoder, layout, encoder_plan(), cp_style="space")
        state = get_model_state_dict(model)
        if index:
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state)
        else:
            net.load_state_dict(parameters(model))
        if layout.cp > 1:
            step(model, own_rows(fields, RANKS, rank.rank), own_rows(targets, RANKS, rank.rank), count)
        else:
            step(model, own(fields, rank.rank, RANKS), own(targets, rank.rank, RANKS), count)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        net.zero_grad()
        step(net, fields, targets, count)
    return furthest(parameters(model), dict(net.named_parameters()))


def test_weights_that_belong_to_the_rows_of_a_rank(run_on_ranks, tmp_path):
    """Strips, samples, strips: the checkpoints have full parameters, whatever splits the fields."""
    for error in run_on_ranks(trained, RANKS, str(tmp_path)):
        assert error <= 1e-12
