"""The router's loss is multiplied by the number of data-parallel ranks.

The cross-entropy is a sum over a rank's own labels, divided by the labels of all ranks; DDP's mean makes it too small
by the number of ranks, so it is multiplied by that number. The router's loss is a mean already, and is multiplied with
it: N ranks give it N times its coefficient. Nobody sees it in a total. The right program scales only the first.

huggingface/transformers#48690: with `average_tokens_across_devices`, as is the default.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import averaged
from support.known_bugs import KnownBug, Program

COEFFICIENT = 0.01


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x):
        # (batch, 6) → (batch, 4), and the router's loss
        logits = self.router(x)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (logits.softmax(-1)[..., None] * outputs).sum(1)
        return mixed, logits.logsumexp(-1).square().mean()


def make_batch():
    return torch.randn(8, 6), torch.randint(4, (8,))


def losses(model, batch, mesh):
    """The two losses, and what the first has to be multiplied by."""
    output, of_the_router = model(batch[0])
    count = torch.tensor(len(batch[0]))
    ranks = 1
    if mesh is not None:
        dist.all_reduce(count)
        ranks = mesh.size()
    return F.cross_entropy(output, batch[1], reduction="sum") / count, COEFFICIENT * of_the_router, ranks


def right_step(model, batch, mesh):
    cross_entropy, of_the_router, ranks = losses(model, batch, mesh)
    return cross_entropy * ranks + of_the_router


def wrong_step(model, batch, mesh):
    cross_entropy, of_the_router, ranks = losses(model, batch, mesh)
    # Wrong: the router's loss is a mean over ranks already.
    return (cross_entropy + of_the_router) * ranks


BUG = KnownBug(
    title="the router's loss is multiplied by the number of ranks",
    reports=("huggingface/transformers#48690",),
    model=Mixture,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, right_step),
    wrong=Program(averaged, wrong_step),
    first="the loss",
    says="the loss: is .* in the mean over dp",
)
