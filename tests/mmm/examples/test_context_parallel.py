"""The example as a user runs it."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import mmm.history
from mmm.examples.context_parallel import Config, positions_of, ring_attention, train
from mmm.parallel.cp.ring import RingAttention
from mmm.parallel.cp.ring import positions_of as package_positions
from mmm.run.command_line import configure
from support.programs import run_program


@pytest.mark.long
def test_same_losses_as_on_one_device(run_on_ranks, tmp_path):
    """cp2·tp2 by a ring, against a process that nothing started as a rank."""
    flags = ["--preset", "debug", "--seq_length", "32", "--global_batch_size", "4", "--eval_batches", "1"]
    flags += ["--dtype", "fp64", "--max_iters", "3", "--tp", "2", "--no-plots", "--outdir", tmp_path / "four"]
    done = run_program(run_on_ranks, 4, "mmm.examples.context_parallel", *flags)
    assert done.returncode == 0, done.stderr
    assert "layout cp2·tp2" in done.stdout
    assert "dim 1 over tp, dim 0 over dp_shard_cp" in done.stdout
    assert "Warning" not in done.stderr
    sizes = {"preset": "debug", "seq_length": 32, "global_batch_size": 4, "eval_batches": 1}
    train(configure(Config, **sizes, outdir=tmp_path / "one", max_iters=3, dtype="fp64", plots=False))
    one, four = (mmm.history.load(tmp_path / name) for name in ("one", "four"))
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)
    np.testing.assert_allclose(one.val_loss, four.val_loss, rtol=1e-9)


def rings(rank):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    torch.manual_seed(rank.rank)
    tensors = [torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    dy = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    results = []
    for attend in (lambda q, k, v: ring_attention(q, k, v, mesh.get_group()), RingAttention(mesh)):
        y = attend(*tensors)
        results.append([y.detach(), *torch.autograd.grad(y, tensors, dy)])
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_by_hand_is_the_packages(run_on_ranks, ranks):
    for by_hand, package in run_on_ranks(rings, ranks):
        for a, b in zip(by_hand, package, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for rank in range(ranks):
        assert positions_of(rank, ranks, 24).tolist() == package_positions(rank, ranks, 24).tolist()
