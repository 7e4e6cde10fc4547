"""`--exact` of the trainers: what a run leaves has the same bits on other ranks, and what is not exact is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmm.data.text.prepare import Preparation, prepare
from mmm.errors import ConfigError
from mmm.run.command_line import configure
from mmm.trainer import lm
from support.resuming import curve, tensors, train

# Flags of runs that have to be equal to the last bit.
LM = {
    "preset": "debug",
    "seq_length": 64,
    "global_batch_size": 8,
    "max_iters": 3,
    "dtype": "fp32",
    "pack": True,
    "document_mask": True,
    "eval_every": 0,
    "eval_batches": 1,
}
VIT = {"preset": "debug", "dataset": "fake", "global_batch_size": 8, "max_iters": 3, "checkpoint_every": 3}


@pytest.mark.long
def test_vit(run_on_ranks, tmp_path):
    flags = {**VIT, "exact": 4, "dtype": "fp32"}
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_on_ranks(train, 1, "mmm.trainer.vit", {**flags, "outdir": one}) == [""]
    assert run_on_ranks(train, 2, "mmm.trainer.vit", {**flags, "outdir": two}) == ["", ""]
    for column in ("loss", "grad_norm"):
        assert curve(one, column) == curve(two, column)
    expected, saved = (tensors(folder / "checkpoints/step-3") for folder in (one, two))
    assert expected.keys() == saved.keys()
    for name in expected:
        assert torch.equal(expected[name], saved[name])


@pytest.mark.parametrize("layout", [{}, pytest.param({"pp": 2}, marks=pytest.mark.long)], ids=str)
def test_packed_documents(run_on_ranks, tmp_path, layout):
    """Which attention computes each by itself: how many a rank has decides no bit."""
    rng = np.random.RandomState(0)
    texts = []
    for _ in range(200):
        # Letters.
        codes = rng.randint(97, 123, rng.randint(2, 40))
        texts.append("".join(map(chr, codes)))
    (tmp_path / "text").write_text("#".join(texts))
    prepare(Preparation((tmp_path / "text",), tmp_path / "tokens", separator="#"), 1)
    flags = {**LM, "text": (tmp_path / "tokens",), "exact": 4}
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_on_ranks(train, 1, "mmm.trainer.lm", {**flags, "outdir": one}) == [""]
    assert run_on_ranks(train, 2, "mmm.trainer.lm", {**flags, **layout, "outdir": two}) == ["", ""]
    for column in ("loss", "grad_norm"):
        assert curve(one, column) == curve(two, column)


def test_an_optimizer_that_is_not_exact():
    with pytest.raises(ConfigError, match="--optimizer muon: only adamw and sgd"):
        lm.resolve(configure(lm.Config, device="cpu", exact=4, optimizer="muon", preset="debug"))


def test_a_number_of_lanes_without_a_tree_is_refused_with_the_flags():
    with pytest.raises(ConfigError, match="exact 3: it must be a power of two"):
        configure(lm.Config, device="cpu", exact=3)
