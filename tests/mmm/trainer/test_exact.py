"""`--exact` of the trainers: what a run leaves has the same bits on other ranks, and what is not exact is refused."""

from __future__ import annotations

import pytest
import torch

from mmm.errors import ConfigError
from mmm.run.command_line import configure
from mmm.trainer import lm, vit
from support.resuming import curve, tensors, train

VIT = {"preset": "debug", "dataset": "fake", "global_batch_size": 8, "max_iters": 3, "checkpoint_every": 3}


@pytest.mark.parametrize(("exact", "layout"), [("4", {}), ("2.1.2", {"tpsize": 2})], ids=str)
@pytest.mark.long
def test_vit(run_on_ranks, tmp_path, exact, layout):
    flags = {**VIT, "exact": exact, "dtype": "fp32"}
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_on_ranks(train, 1, "mmm.trainer.vit", {**flags, "outdir": one}) == [""]
    assert run_on_ranks(train, 2, "mmm.trainer.vit", {**flags, **layout, "outdir": two}) == ["", ""]
    for column in ("loss", "grad_norm"):
        assert curve(one, column) == curve(two, column)
    expected, saved = (tensors(folder / "checkpoints/step-3") for folder in (one, two))
    assert expected.keys() == saved.keys()
    assert all(torch.equal(expected[name], saved[name]) for name in expected)


@pytest.mark.parametrize("optimizer", ["lars", "lamb", "muon"])
def test_optimizers_that_are_not_exact(optimizer):
    with pytest.raises(ConfigError, match=f"--optimizer {optimizer}: only adamw and sgd"):
        lm.resolve(configure(lm.Config, device="cpu", exact="4", optimizer=optimizer, preset="debug"))


def test_images_have_no_sequence():
    with pytest.raises(ConfigError, match="no sequence"):
        vit.resolve(configure(vit.Config, device="cpu", exact="4.2", preset="debug", global_batch_size=8))


def test_a_wrong_partition_is_refused_with_the_flags():
    with pytest.raises(ConfigError, match="3 lanes are not a power of two"):
        configure(lm.Config, device="cpu", exact="3")
