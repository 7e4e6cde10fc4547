"""What a run says at its start: of its model, its ranks on the mesh and on hosts, its optimizer."""

import torch
from torch import nn

from mmm.layout import Layout
from mmm.models.vit.model import ViT, ViTConfig
from mmm.optim.adamw import make_optimizer
from mmm.run.tables import mesh_table
from mmm.trainer.job import model_summary
from mmm.trainer.rate import optimizer_text


def test_multiply_adds_are_those_of_all_tokens():
    sizes = ViTConfig(image_size=32, patch_size=8, classes=10, dim=64, n_layers=2, n_heads=4)
    with torch.device("meta"):
        model, images = ViT(sizes), torch.zeros(3, sizes.channels, 32, 32)
    tokens, dim, patch = 3 * 16, 64, 8 * 8 * sizes.channels
    layer = tokens * (4 * dim * dim + 2 * 4 * dim * dim) + 2 * tokens * 16 * dim  # projections, MLP, attention
    expected = tokens * patch * dim + 2 * layer + 3 * dim * sizes.classes
    assert f"Total mult-adds: {expected:,}, of forward's matrix products" in model_summary(model, images)


def test_ranks_on_the_mesh():
    table = mesh_table(Layout(pp=2, dp_shard=2, tp=3)).splitlines()
    assert table[0] == "ranks on the mesh, along tp"
    assert table[2] == "pp 0  dp_shard 1    3  4  5"
    assert table[4] == "pp 1  dp_shard 1    9 10 11"
    assert mesh_table(Layout(dp_shard=8)) == ""
    assert len(mesh_table(Layout(dp_shard=8, tp=8)).splitlines()) == 9
    assert mesh_table(Layout(dp_shard=16, tp=8)) == ""


def test_an_optimizer_in_words():
    model = nn.Linear(4, 2)
    text = optimizer_text(make_optimizer("adamw", model.parameters(), 0.003, 0.1, "matrices"))
    assert text == "AdamW, lr 0.003, betas (0.9, 0.999), weight decay 0.1 of 8 of 10 parameters"
    assert optimizer_text(make_optimizer("sgd", model.parameters(), 0.5)) == "SGD, lr 0.5"
