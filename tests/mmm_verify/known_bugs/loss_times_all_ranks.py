"""The loss is multiplied by all ranks, and not by the data-parallel ones.

DDP's mean is undone by multiplying with the number of ranks that have different samples. Tensor-parallel ranks have
the same samples: with them in the count, loss and gradients are too large by the size of tp. With clipping nobody sees
it. The right program asks for the size of the data-parallel group.

huggingface/transformers#45994 and huggingface/transformers#39648.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import average, copy, reduce
from support.known_bugs import KnownBug, Program, own_part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 5, bias=False)
        self.group = None

    def forward(self, x):
        # (batch, 4) → (batch, 5)
        if self.group is None:
            return self.down(torch.tanh(self.up(x)))
        return reduce(self.down(torch.tanh(self.up(copy(x, self.group)))), self.group)


def make_batch():
    return torch.randn(6, 4), torch.randint(5, (6,))


def parallelize(model, mesh):
    tp = mesh["tp"]
    model.group = tp.get_group()
    model.up.weight = nn.Parameter(own_part(model.up.weight.detach(), tp, 0).clone())
    model.up.bias = nn.Parameter(own_part(model.up.bias.detach(), tp, 0).clone())
    model.down.weight = nn.Parameter(own_part(model.down.weight.detach(), tp, 1).clone())
    average(model, mesh["dp"].get_group())


def loss_of(model, batch, mesh, ranks):
    count = torch.tensor(len(batch[0]))
    if mesh is not None:
        dist.all_reduce(count, group=mesh["dp"].get_group())
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / count
    return loss if mesh is None else loss * ranks(mesh)


def right_step(model, batch, mesh):
    return loss_of(model, batch, mesh, ranks=lambda mesh: mesh["dp"].size())


def wrong_step(model, batch, mesh):
    # Wrong: only the ranks of dp are averaged over.
    return loss_of(model, batch, mesh, ranks=lambda mesh: mesh.size())


BUG = KnownBug(
    title="the loss is multiplied by the number of all ranks, not of the data-parallel ones",
    reports=("huggingface/transformers#45994", "huggingface/transformers#39648"),
    model=Net,
    batch=make_batch,
    mesh="dp2,tp2",
    right=Program(parallelize, right_step),
    wrong=Program(parallelize, wrong_step),
    first="the loss",
    says="the loss: is .* in the mean over dp",
)
