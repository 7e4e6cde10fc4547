"""A loss in chunks collects the gradient of the hidden states, and forgets that each rank has a part of it.

To save memory the head and the loss go backward chunk by chunk, and add to a buffer for the gradient of what comes
before. The head is sharded over the vocabulary, so what each rank collects is a summand; the buffer is labelled as
complete. The loss is right in the first step, then ends higher than on one device. The right program adds up the
buffer over tp.

pytorch/torchtitan#3412: ChunkedCELoss with tensor parallelism.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import reduce
from support.known_bugs import KnownBug, Program, own_part

CHUNKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 12, bias=False)

    def forward(self, x):
        # (batch, 6) → (batch, 12)
        return self.head(torch.tanh(self.body(x)))


def make_batch():
    return torch.randn(8, 6), torch.randint(12, (8,))


def shard_vocabulary(model, mesh):
    model.head.weight = nn.Parameter(own_part(model.head.weight.detach(), mesh, 0).clone())


def sum_of_losses(logits, labels, mesh):
    """The cross-entropy of logits (batch, own words), summed over the batch."""
    group = mesh.get_group()
    log_normalizer = reduce(logits.exp().sum(-1), group).log()
    local = labels - mesh.get_local_rank() * logits.shape[-1]
    is_own = (local >= 0) & (local < logits.shape[-1])
    picked = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return (log_normalizer - reduce(torch.where(is_own, picked, 0.0), group)).sum()


def in_chunks(model, batch, mesh, adds_up):
    inputs, labels = batch
    if mesh is None:
        return F.cross_entropy(model(inputs), labels)
    hidden = torch.tanh(model.body(inputs))
    buffer = hidden.detach().requires_grad_()
    total = 0.0
    for own_hidden, own_labels in zip(buffer.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        loss = sum_of_losses(model.head(own_hidden), own_labels, mesh) / len(labels)
        loss.backward()
        total += loss.detach()
    if adds_up:
        dist.all_reduce(buffer.grad, group=mesh.get_group())
    hidden.backward(buffer.grad)
    return total


def right_step(model, batch, mesh):
    return in_chunks(model, batch, mesh, adds_up=True)


def wrong_step(model, batch, mesh):
    # Wrong: each rank's words give only a part of the hidden states' gradient.
    return in_chunks(model, batch, mesh, adds_up=False)


BUG = KnownBug(
    title="a loss in chunks does not add up the hidden states' gradient over tp",
    reports=("pytorch/torchtitan#3412",),
    model=Net,
    batch=make_batch,
    mesh="tp2",
    right=Program(shard_vocabulary, right_step),
    wrong=Program(shard_vocabulary, wrong_step),
    first="gradient of body.weight",
    says="body.weight on rank 0: partial over tp",
)
