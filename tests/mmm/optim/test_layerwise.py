"""LARS and LAMB: the papers' steps, on full tensors and on sharded ones. Muon: the orthogonalized momentum, and the
same update on every mesh."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mmm.history
from mmm.optim.layerwise import make_layerwise
from mmm.optim.muon import Muon, orthogonalized
from mmm.parallel import Layout, build_mesh
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm_lab.parity.optimizers import RATES
from support.pool import program_on

SHAPES = [(5, 3), (7,), (6, 2), (4, 4), (3, 2, 4), (2, 3), (9, 4)]
STEPS = 3


def draws(shape, generator):
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def trained(make, kinds):
    """Full parameters after some steps, of which the last but one begins as 0. kinds: mesh and placements, or None."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for index, (shape, kind) in enumerate(zip(SHAPES, kinds, strict=True)):
        full = draws(shape, generator) * (index != len(SHAPES) - 2)
        parameters.append(nn.Parameter(full if kind is None else distribute_tensor(full, *kind)))
    optimizer = make(parameters)
    for _ in range(STEPS):
        for parameter, kind in zip(parameters, kinds, strict=True):
            gradient = draws(parameter.shape, generator)
            parameter.grad = gradient if kind is None else distribute_tensor(gradient, *kind)
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]


class PaperLARS(torch.optim.Optimizer):
    """You et al., 2017, algorithm 1: μ = 0.9, λ = 5e-4, η = 1e-3; biases and norms without λ and η."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for w in self.param_groups[0]["params"]:
            rate, decay = RATES["lars"], 0.0
            if w.ndim > 1:
                decay = 5e-4
                if w.norm() > 0 and w.grad.norm() > 0:
                    rate *= 1e-3 * w.norm() / (w.grad.norm() + decay * w.norm())
            v = self.state[w].get("v", torch.zeros_like(w))
            self.state[w]["v"] = v = 0.9 * v + rate * (w.grad + decay * w)
            w -= v


class PaperLAMB(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2: β₁ = 0.9, β₂ = 0.999, ε = 1e-6, λ = 0.01, φ(z) = z; biases and norms without λ
    and the ratio."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for w in self.param_groups[0]["params"]:
            m, v = self.state[w].get("moments", (torch.zeros_like(w), torch.zeros_like(w)))
            m, v = 0.9 * m + 0.1 * w.grad, 0.999 * v + 0.001 * w.grad**2
            self.state[w]["moments"] = m, v
            update = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-6)
            rate = RATES["lamb"]
            if w.ndim > 1:
                update += 0.01 * w
                if w.norm() > 0 and update.norm() > 0:
                    rate *= w.norm() / update.norm()
            w -= rate * update


def plain(name):
    paper = {"lars": PaperLARS, "lamb": PaperLAMB}[name]
    return trained(paper, [None] * len(SHAPES))


def ours(name, kinds):
    return trained(lambda parameters: make_layerwise(name, parameters, RATES[name]), kinds)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_papers_step(name):
    for found, expected in zip(ours(name, [None] * len(SHAPES)), plain(name), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize(("name", "decay"), [("lars", 0.0), ("lamb", 0.0), ("lamb", 0.3)])
def test_the_ratio_of_a_matrix_alone(name, decay):
    """A matrix moves by the rate times its own norm, whatever its gradient's size; a bias by what the gradient says."""
    moved = {}
    for size in (1e-3, 1e3):
        parameters = [nn.Parameter(torch.full(shape, 2.0, dtype=torch.float64)) for shape in ((3, 4), (5,))]
        start = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        make_layerwise(name, parameters, 0.1, decay, "all").step()
        moved[size] = [(p.detach() - s).norm().item() for p, s in zip(parameters, start, strict=True)]
    matrix, eta = torch.full((3, 4), 2.0).norm().item(), {"lars": 1e-3, "lamb": 1.0}[name]
    assert [moved[size][0] for size in moved] == pytest.approx([0.1 * eta * matrix] * 2, rel=1e-3)
    if name == "lars":
        assert moved[1e3][1] == pytest.approx(0.1 * 1e3 * 5**0.5)


def sharded(rank, name):
    mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu", 30)
    both, tp = mesh.device_mesh, mesh["tp"]
    kinds = [None, (tp, [Shard(0)]), (both, [Shard(0), Shard(0)]), (both, [Shard(0), Shard(1)])]
    kinds += [(both, [Shard(0), Replicate()]), (tp, [Shard(1)]), (both, [Shard(0), Shard(0)])]
    with patch("mmm.optim.layerwise.dist.all_reduce", side_effect=dist.all_reduce) as all_reduce:
        found = ours(name, kinds)
    return found, [call.args[0].shape for call in all_reduce.call_args_list]


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_norms_of_full_tensors_by_one_all_reduce_an_axis(run_on_ranks, name):
    expected = plain(name)
    for found, sent in run_on_ranks(sharded, 4, name):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-12)
        assert sent == [(4, 2), (4, 2)] * STEPS  # over dp, over tp: of the matrices that each shards


def test_in_float32_the_first_steps_keep_their_digits():
    """1 - 0.999ᵗ loses four of seven digits in float32, where it is computed as it is written."""
    single, double = (nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    for parameter in (single, double):
        optimizer = make_layerwise("lamb", [parameter], 0.1)
        for _ in range(2):
            parameter.grad = torch.tensor([1.0, 2.0, -3.0, 0.1], dtype=parameter.dtype)
            optimizer.step()
    torch.testing.assert_close(single.double(), double, atol=3e-7, rtol=0)


FLAGS = {
    "preset": "debug",
    "n_kv_heads": 1,
    "ffn_dim": 90,  # matrices that are wider, and that are higher
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
    numbers = torch.Generator().manual_seed(0)
    matrix, vector = (torch.randn(shape, dtype=torch.float64, generator=numbers) for shape in ((6, 4), (4,)))
    ours, rest, theirs = (nn.Parameter(x.clone()) for x in (matrix, vector, vector))
    groups = [{"params": [ours], "weight_decay": 0.1, "muon": True}, {"params": [rest], "weight_decay": 0.1}]
    optimizer, adamw = Muon(groups, lr=0.1), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
    momentum = torch.zeros_like(matrix)
    for _ in range(2):
        gradient = torch.randn(6, 4, dtype=torch.float64, generator=numbers)
        ours.grad, rest.grad = gradient, torch.ones_like(rest)
        theirs.grad = torch.ones_like(rest)
        optimizer.step()
        adamw.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalized(0.05 * gradient + 0.95 * momentum)
        matrix = matrix - 0.1 * 0.1 * matrix - 0.1 * 0.2 * 6**0.5 * update
    torch.testing.assert_close(ours.detach(), matrix, atol=1e-12, rtol=0)
    assert torch.equal(rest, theirs)


def test_it_is_pytorchs_up_to_bfloat16():
    start = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "muon": True}
    optimizers = [Muon([group], lr=0.1)]
    optimizers.append(torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for step in range(3):
        gradient = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
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


LAYOUTS = [
    pytest.param(4, {"tpsize": 2}, id="dp2·tp2"),
    pytest.param(4, {"pp": 2}, id="pp2·dp2", marks=pytest.mark.long),
    pytest.param(4, {"parallel": "zero1", "tpsize": 2}, id="zero1 on dp2·tp2", marks=pytest.mark.long),
    pytest.param(3, {"global_batch_size": 9}, id="dp3", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_the_same_update_on_every_mesh(run_on_ranks, alone, tmp_path, ranks, flags):
    if "global_batch_size" in flags:  # rows that the ranks do not divide
        lm.train(configure(lm.Config, **{**FLAGS, **flags}, device="cpu", outdir=tmp_path / "one"))
        alone = mmm.history.load(tmp_path / "one")
    run_on_ranks(run, ranks, tmp_path / "many", flags)
    many = mmm.history.load(tmp_path / "many")
    for name in ("loss", "val_loss", "grad_norm"):
        np.testing.assert_allclose(many[name], alone[name], rtol=1e-9)
