"""The vision programs as a user runs them: examples.fsdp, trainer.fsdp, trainer.vit."""

import json
import re

import numpy as np
import pytest
import torch

import mmm.history
from mmm.data.images.datasets import load_images
from mmm.data.images.published import SERVERS
from mmm.errors import UserError
from mmm.examples import fsdp, parallel_4d
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.run.command_line import configure
from mmm.trainer import cnn as cnn_trainer
from mmm.trainer import vit
from mmm_verify.testing.plugin import _pool
from support.programs import run_program
from support.published import write_mnist


def run(run_on_ranks, ranks, module, outdir, *flags):
    done = run_program(run_on_ranks, ranks, module, "--outdir", outdir, "--no-plots", *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


# A run of three steps.
CNN_FLAGS = ["--dataset", "digits", "--global_batch_size", "24", "--max_iters", "3", "--dtype", "fp64"]


@pytest.fixture(scope="module")
def cnn(request, tmp_path_factory):
    """The explicit example on one rank and on three, which do not divide the 360 test images."""
    folder = tmp_path_factory.mktemp("cnn")
    options = {"dataset": "digits", "global_batch_size": 24, "max_iters": 3, "dtype": "fp64"}
    fsdp.train(configure(fsdp.Config, **options, plots=False, outdir=folder / "1"))
    out = run(_pool(request.config).run, 3, "mmm.examples.fsdp", folder / "3", *CNN_FLAGS, "--save_model")
    return folder, out


@pytest.mark.long
def test_losses_and_accuracy_do_not_depend_on_the_ranks(cnn):
    one, three = (mmm.history.load(cnn[0] / ranks) for ranks in ("1", "3"))
    for name in ("train_loss", "test_loss"):
        np.testing.assert_allclose(three[name], one[name], rtol=1e-9)
    assert three.test_acc.values.tolist() == one.test_acc.values.tolist()
    assert json.loads((cnn[0] / "3/config.json").read_text())["data"]["test_images"] == 360


@pytest.mark.long
def test_a_row_an_epoch(cnn):
    lines = [line for line in cnn[1].splitlines() if " - epoch=" in line]
    assert len(lines) == 1
    for word in ("epoch=1 ", " train_loss=", " test_loss=", " test_acc=", " sps="):
        assert word in lines[0]
    assert "of 1,199,882 parameters" in cnn[1]
    assert "\x1b" not in cnn[1]


@pytest.mark.long
def test_the_saved_model_is_plain_pytorch(cnn):
    model = CNN(CNNConfig())
    model.load_state_dict(torch.load(cnn[0] / "3/model.pt", weights_only=True))
    model.double().eval()
    images, labels = load_images("digits").test.images(range(360))
    with torch.no_grad():
        logits = model(images.double())
    right = (logits.argmax(1) == labels).double().mean()
    loss = torch.nn.functional.cross_entropy(logits, labels)
    # Padded to 384 images, which must not count.
    evaluated = mmm.history.load(cnn[0] / "3")
    assert 100 * right.item() == pytest.approx(float(evaluated.test_acc[-1]), abs=1e-9)
    assert loss.item() == pytest.approx(float(evaluated.test_loss[-1]), rel=1e-9)


def test_digits_stand_in_and_the_record_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SERVERS, "mnist", "http://127.0.0.1:9/")
    monkeypatch.setenv("MMM_DATA", str(tmp_path / "cache"))
    fsdp.train(configure(fsdp.Config, max_iters=2, plots=False, outdir=tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["data"]["dataset"], config["data"]["dataset_asked"]) == ("digits", "mnist")
    assert len(config["notes"]) == 1
    assert "mnist is not in" in config["notes"][0]
    assert config["notes"][0] in capsys.readouterr().out
    assert config["global_batch_size"] == 32


@pytest.mark.parametrize(
    ("program", "config", "message"),
    [
        (fsdp, {"data_dir": "DAMAGED"}, "a file of it is damaged"),
        (fsdp, {"data_dir": "EMPTY"}, "EMPTY"),
        (fsdp, {"dataset": "folder", "data_dir": "EMPTY"}, "EMPTY has images of 0 classes"),
        (fsdp, {"dataset": "folder"}, "needs --data_dir"),
        (fsdp, {"dataset": "digits", "batch_size": 2000}, "1437 images, fewer than a global batch of 2000"),
        (cnn_trainer, {"dataset": "digits", "parallel": "hsdp"}, "dp_replicate 2"),
        (fsdp, {"dataset": "digits", "gamma": 1.5}, "--gamma 1.5"),
        (cnn_trainer, {"dataset": "digits", "microbatches": 0}, "microbatches 0"),
        (vit, {"patch_size": 7}, "image_size 32"),
        (vit, {"model": "swin", "window": 5}, "patch_size 1 · window 5 = 5"),
        (vit, {"model": "swin", "n_heads": 16}, "dim 32 / n_heads 16 = 2 is not divisible by 4"),
        (vit, {"model": "swin", "attention": "native"}, "a Swin has only sdpa"),
        (
            vit,
            {"model": "swin", "preset": "tiny"},
            "--preset tiny with --model swin: its presets are debug, small, large",
        ),
        (vit, {"window": 4}, "--window 4 with --model vit"),
        (vit, {"dataset": "digits", "channels": 2}, "1 or 3 channels, not 2"),
        (vit, {"dataset": "digits", "classes": 7}, "--classes 7"),
        (vit, {"warmup": -1}, "--warmup -1"),
        (vit, {"dataset": "digits", "batch_size": 2000}, "--global_batch_size 1437"),
        (vit, {"dataset": "digits", "workers": -1}, "--workers -1"),
        (fsdp, {"dataset": "digits", "workers": -1}, "--workers -1"),
        (parallel_4d, {"batch_size": 10**6}, "fewer than one global batch of 1000000"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_before_any_process_group(tmp_path, monkeypatch, program, config, message, no_process_group):
    monkeypatch.setattr("mmm.history.prepare", lambda *_, **__: pytest.fail("the run's folder was made"))
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "DAMAGED").mkdir()
    (write_mnist(tmp_path / "DAMAGED") / "t10k-labels-idx1-ubyte").write_bytes(b"")
    if "data_dir" in config:
        config = {**config, "data_dir": tmp_path / config["data_dir"]}
    with pytest.raises(UserError) as refused:
        program.train(configure(program.Config, **config))
    assert re.search(message, str(refused.value)), refused.value
