"""Models whose parameters are on the meta device and whose buffers are real."""

import torch
from torch import nn

from mmm.nn.meta import meta_parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        self.first, self.second = shared, shared
        self.norm = nn.BatchNorm1d(4)
        filled = torch.empty(2, 2).fill_(float("-inf")).triu_(1)
        self.register_buffer("mask", filled, persistent=False)
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("nothing", None)


def test_parameters_have_shapes_and_buffers_have_values():
    with meta_parameters():
        net = Net()
    plain = Net()
    assert all(p.is_meta for p in net.parameters())
    assert [(n, p.shape, p.requires_grad) for n, p in net.named_parameters(remove_duplicate=False)] == [
        (n, p.shape, p.requires_grad) for n, p in plain.named_parameters(remove_duplicate=False)
    ]
    assert net.tied.weight is net.linear.weight
    assert net.first is net.second
    assert dict(net.named_buffers()).keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name
    assert "mask" not in net.state_dict()
    # It is over.
    assert not nn.Linear(1, 1).weight.is_meta
