"""--scale_lr: a learning rate that grows with the global batch, said in the record and used; LARS and LAMB by flags."""

import numpy as np
import pytest

import mmm.history
from mmm.errors import ConfigError
from mmm.run.command_line import configure
from mmm.trainer import cnn, lm, vit
from mmm.trainer.config import Optimizer
from support.pool import program_on

FLAGS = {
    "preset": "debug",
    "seq_length": 16,
    "max_iters": 3,
    "dtype": "fp64",
    "plots": False,
    "warmup": 0,
    "eval_batches": 1,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("scale", "base", "batch", "rate"),
    [("none", None, 64, 0.1), ("linear", None, 64, 0.4), ("sqrt", None, 64, 0.2), ("linear", 256, 64, 0.025)],
)
def test_the_rate(scale, base, batch, rate):
    lr, notes = Optimizer(lr=0.1, scale_lr=scale, base_batch_size=base).scaled(batch, 16)
    assert lr == pytest.approx(rate)
    assert bool(notes) == (scale != "none")
    if notes:
        assert f"a global batch of 64 over a base of {base or 16}, {scale}" in notes[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"base_batch_size": 8}, "--base_batch_size 8 without --scale_lr"),
        ({"base_batch_size": 0, "scale_lr": "sqrt"}, "--base_batch_size 0"),
        ({"optimizer": "lars", "betas": (0.9, 0.99)}, "--betas 0.9 0.99 with --optimizer"),
        ({"optimizer": "sgd", "decayed": "matrices"}, "--decayed"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        configure(lm.Config, **flags)


def test_every_trainer_has_it():
    """A base by default of what one rank has; digits have a global batch of their own."""
    shared = {"scale_lr": "linear", "global_batch_size": 64, "device": "cpu"}
    assert lm.resolve(configure(lm.Config, **{**FLAGS, **shared}, lr=0.1)).lr == pytest.approx(0.4)
    assert vit.resolve(configure(vit.Config, **shared, lr=0.1)).lr == pytest.approx(0.4)
    digits = cnn.resolve(configure(cnn.Config, **shared, dataset="digits", lr=0.1))
    assert digits.lr == pytest.approx(0.2)
    assert digits.describe()["scaled_lr"] == digits.lr


def run(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, **flags}, outdir=outdir))


LAYOUTS = [
    pytest.param("lamb", 2, {"tpsize": 2}, id="tp2, LAMB"),
    pytest.param("lamb", 4, {"parallel": "hsdp", "offload": True}, id="hsdp on the host, LAMB", marks=pytest.mark.long),
    pytest.param("lars", 2, {"pp": 2, "tie_word_embeddings": True}, id="pp2, tied, LARS", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("optimizer", "ranks", "layout"), LAYOUTS)
def test_the_same_losses_on_every_mesh(run_on_ranks, tmp_path, optimizer, ranks, layout):
    flags = {"optimizer": optimizer, "lr": 4.0 if optimizer == "lars" else 0.02, "max_norm": 0.5}
    flags |= {"scale_lr": "sqrt", "base_batch_size": 4, "global_batch_size": 8}
    flags |= {name: layout[name] for name in layout if name == "tie_word_embeddings"}
    lm.train(configure(lm.Config, **FLAGS, **flags, outdir=tmp_path / "one"))
    run_on_ranks(run, ranks, tmp_path / "many", {**flags, **layout})
    one, many = (mmm.history.load(tmp_path / name) for name in ("one", "many"))
    for name in ("loss", "val_loss", "grad_norm"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-9)
    assert one.lr[0] == pytest.approx(flags["lr"] * 2**0.5)
