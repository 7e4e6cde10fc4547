"""Labels are shifted by one after the sequence is cut into context-parallel parts.

The label of a token is the next token. At the end of a rank's part that is the first token of the next rank's; a shift
within the part takes the first of its own instead. One label in each part is wrong: a loss that is a little too high,
with outliers where the parts meet. The right program shifts first, then cuts.

verl-project/verl#4250, the first of its two bugs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from support.by_hand import add_up
from support.known_bugs import KnownBug, Program, own_part


def make_model():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def make_batch():
    return torch.randint(11, (4, 6))


def shifted(tokens):
    """The next token of each, and the first after the last."""
    return tokens.roll(-1, 1)


def loss_of(model, tokens, labels, count):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count


def right_step(model, tokens, mesh):
    labels = shifted(tokens)
    count = tokens.numel()
    if mesh is not None:
        tokens, labels = own_part(tokens, mesh, 1), own_part(labels, mesh, 1)
    return loss_of(model, tokens, labels, count)


def wrong_step(model, tokens, mesh):
    count = tokens.numel()
    if mesh is not None:
        tokens = own_part(tokens, mesh, 1)
    # Wrong: the last token of a part has its label on the next rank.
    return loss_of(model, tokens, shifted(tokens), count)


BUG = KnownBug(
    title="labels are shifted after the sequence was cut for context parallelism",
    reports=("verl-project/verl#4250",),
    model=make_model,
    batch=make_batch,
    mesh="cp2",
    right=Program(add_up, right_step),
    wrong=Program(add_up, wrong_step),
    first="the loss",
    says="the loss: ",
)
