"""Muon: the orthogonalized momentum, and the same update on every mesh."""

import numpy as np
import pytest
import torch
from torch import nn

import mmm.history
from mmm.optim.muon import Muon, orthogonalized
from mmm.run.command_line import configure
from mmm.trainer import lm
from support.pool import program_on

# A run of the language model with Muon.
FLAGS = {
    "preset": "debug",
    "n_kv_heads": 1,
    # Matrices that are wider, and that are higher.
    "ffn_dim": 90,
    "seq_length": 16,
    "global_batch_size": 8,
    "max_iters": 5,
    "dtype": "fp64",
    "plots": False,
    "optimizer": "muon",
    "lr": 0.02,
    "weight_decay": 0.1,
    "decayed": "matrices",
    "max_norm": 0.5,
    "eval_every": 2,
    "eval_batches": 1,
}


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_singular_values_become_alike(shape):
    """The iteration is a polynomial of the singular values, and leaves the vectors as they are."""
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalized(matrix), u @ torch.diag(s) @ v, atol=1e-11, rtol=0)
    assert s.min() > 0.6
    assert s.max() < 1.3


def test_a_step_is_the_written_out_one():
    """Of a matrix twice, with momentum and decay; the rest is AdamW's."""
    rng = torch.Generator().manual_seed(0)
    matrix, vector = (torch.randn(shape, dtype=torch.float64, generator=rng) for shape in ((6, 4), (4,)))
    ours, rest, theirs = (nn.Parameter(x.clone()) for x in (matrix, vector, vector))
    groups = [{"params": [ours], "weight_decay": 0.1, "muon": True}, {"params": [rest], "weight_decay": 0.1}]
    optimizer = Muon(groups, lr=0.1)
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    momentum = torch.zeros_like(matrix)
    for _ in range(2):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=rng)
        ours.grad = gradient
        rest.grad = torch.ones_like(rest)
        theirs.grad = torch.ones_like(rest)
        optimizer.step()
        adamw.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalized(0.05 * gradient + 0.95 * momentum)
        matrix = matrix - 0.1 * 0.1 * matrix - 0.1 * 0.2 * 6**0.5 * update
    torch.testing.assert_close(ours.detach(), matrix, atol=1e-12, rtol=0)
    assert torch.equal(rest, theirs)


def test_it_is_pytorchs_up_to_bfloat16():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch cannot do it: it has no Muon to compare with")
    start = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    ours = nn.Parameter(start.clone())
    theirs = nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "muon": True}
    optimizers = [Muon([group], lr=0.1)]
    optimizers.append(torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for step in range(3):
        gradient = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        ours.grad = gradient.clone()
        theirs.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).abs().max() < 0.03 * (ours - start).abs().max()


def run(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, **flags}, device="cpu", outdir=outdir))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    outdir = tmp_path_factory.mktemp("muon")
    lm.train(configure(lm.Config, **FLAGS, device="cpu", outdir=outdir))
    return mmm.history.load(outdir)


# Ranks, and the flags of each layout.
LAYOUTS = [
    pytest.param(4, {"tpsize": 2}, id="dp2·tp2"),
    pytest.param(4, {"pp": 2}, id="pp2·dp2", marks=pytest.mark.long),
    pytest.param(4, {"parallel": "zero1", "tpsize": 2}, id="zero1 on dp2·tp2", marks=pytest.mark.long),
    pytest.param(3, {"global_batch_size": 9}, id="dp3", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_the_same_update_on_every_mesh(run_on_ranks, alone, tmp_path, ranks, flags):
    # Rows that the ranks do not divide.
    if "global_batch_size" in flags:
        lm.train(configure(lm.Config, **{**FLAGS, **flags}, device="cpu", outdir=tmp_path / "one"))
        alone = mmm.history.load(tmp_path / "one")
    run_on_ranks(run, ranks, tmp_path / "many", flags)
    many = mmm.history.load(tmp_path / "many")
    for name in ("loss", "val_loss", "grad_norm"):
        np.testing.assert_allclose(many[name], alone[name], rtol=1e-9)
