"""The example whose weights have the same bits on any number of ranks."""

import json

import pytest
import torch

from mmm.examples.same_bits import tree_sum
from support.programs import run_program

# 40 is no multiple of 16, the elements of the widest vector register: each shard of a norm has a tail.
SIZES = {"dim": 40, "seq_length": 16, "global_batch_size": 8, "max_iters": 2}


@pytest.fixture
def weights(run_on_ranks, tmp_path):
    """Runs the example on a number of ranks: the hash of its weights."""

    def run(ranks, *flags):
        arguments = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
        arguments += ["--no-plots", "--outdir", tmp_path / "run", "--overwrite", *flags]
        done = run_program(run_on_ranks, ranks, "mmm.examples.same_bits", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        digest = json.loads((tmp_path / "run" / "config.json").read_text())["sha256"]
        assert f"sha256 {digest}" in done.stdout
        return digest

    return run


def test_two_ranks_have_the_bits_of_one(weights):
    assert weights(2) == weights(1)


def test_ordinary_sums_have_other_bits(weights):
    assert weights(2, "--ordinary") != weights(1, "--ordinary")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_each_mesh_and_type_has_the_bits_of_one(weights, dtype):
    flags = ["--lanes", 8, "--dtype", dtype]
    assert len({weights(ranks, *flags) for ranks in (1, 2, 4)}) == 1
    # The number of lanes decides the bits.
    assert weights(2, "--lanes", 4, "--dtype", dtype) != weights(2, *flags)


def test_the_order_of_the_tree():
    """Numbers for which every other order has another sum: 1 is lost next to 1e8, and kept once 1e8 has gone."""
    far = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(far).item() == 2.0
    near = [far[0], far[2], far[1], far[3]]
    assert tree_sum(near).item() == 0.0
    assert tree_sum(far[:1]) is far[0]
