"""A contrastive loss gathers the other ranks' features without their gradients.

Each rank compares its own images with the texts of all ranks. A text is then a negative on other ranks too, and has a
gradient from there, but `dist.all_gather` has no backward: that part is lost. The loss is right to the last digit. The
right program gathers by a function whose backward adds up what every rank has for a feature.

mlfoundations/open_clip#1047 and mlfoundations/open_clip#616.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from support.by_hand import averaged, gather_summed
from support.known_bugs import KnownBug, Program


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, images, texts):
        # (batch, 6), (batch, 5) → (batch, 4) each
        return self.image(images), self.text(texts)


def make_batch():
    return torch.randn(8, 6), torch.randn(8, 5)


def gather_without_gradient(features, group):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, features.detach(), group=group)
    # A rank's own features keep their gradient.
    parts[dist.get_rank(group)] = features
    return torch.cat(parts)


def compare(model, batch, mesh, gather):
    images, texts = model(*batch)
    all_images, all_texts = images, texts
    first = 0
    if mesh is not None:
        all_images = gather(images, mesh.get_group())
        all_texts = gather(texts, mesh.get_group())
        first = mesh.get_local_rank() * len(images)
    # Sample i of a rank belongs to sample first + i of all.
    matches = torch.arange(first, first + len(images))
    return F.cross_entropy(images @ all_texts.T, matches) + F.cross_entropy(texts @ all_images.T, matches)


def right_step(model, batch, mesh):
    return compare(model, batch, mesh, gather_summed)


def wrong_step(model, batch, mesh):
    # Wrong: what other ranks compute from these samples is lost in backward.
    return compare(model, batch, mesh, gather_without_gradient)


BUG = KnownBug(
    title="negatives from other ranks have no gradient in a contrastive loss",
    reports=("mlfoundations/open_clip#1047", "mlfoundations/open_clip#616"),
    model=Towers,
    batch=make_batch,
    mesh="dp2",
    right=Program(averaged, right_step),
    wrong=Program(averaged, wrong_step),
    first="every gradient",
    says="text.weight on rank 0: differs",
)
