"""What is saved on one mesh and loaded on another goes on as what stayed; and is all that a step needs."""

import itertools
import json
import math
import os
from unittest.mock import patch

import pytest

from mmm.examples import checkpoint
from mmm.history import load
from mmm.run.command_line import configure
from support.pool import program_on

FLAGS = {"dtype": "fp64", "max_iters": 6, "global_batch_size": 4, "seq_length": 16, "plots": False, "device": "cpu"}


def run(rank, outdir, optimizer, lacks=None, spoilt=None):
    def some(model, optimizer):
        # Of what is loaded.
        left_out = lacks if next(calls) else None
        return {name: tensors for name, tensors in state_of(model, optimizer).items() if name != left_out}

    def load_spoilt(state, checkpoint_id):
        load_checkpoint(state, checkpoint_id=checkpoint_id)
        if spoilt is not None:
            state["model"][checkpoint.SHOWN].to_local().fill_(spoilt)

    state_of, calls, load_checkpoint = checkpoint.state_of, itertools.count(), checkpoint.dcp.load
    loads = patch.object(checkpoint.dcp, "load", load_spoilt)
    with program_on(rank), patch.object(checkpoint, "state_of", some), loads:
        try:
            checkpoint.train(configure(checkpoint.Config, **FLAGS, optimizer=optimizer, outdir=outdir))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("ranks", "optimizer"), [(4, "adamw"), pytest.param(1, "sgd", marks=pytest.mark.long)])
def test_the_same_losses(run_on_ranks, tmp_path, ranks, optimizer):
    assert run_on_ranks(run, ranks, tmp_path, optimizer) == [""] * ranks
    ds = load(tmp_path)
    assert ds.loss_elsewhere.values[3:].tolist() == pytest.approx(ds.loss.values[3:].tolist(), rel=1e-12)
    assert json.loads((tmp_path / "config.json").read_text())["losses_differ"] < 1e-12
    files = {f"__{rank}_0.distcp" for rank in range(ranks)}
    assert {*os.listdir(tmp_path / "checkpoint")} == {".metadata", *files}
    assert f"rows 0-{256 // ranks - 1} in __0_0.distcp" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("lacks", [pytest.param("model", marks=pytest.mark.long), "optimizer"])
def test_each_part_is_needed(run_on_ranks, tmp_path, lacks):
    for text in run_on_ranks(run, 2, tmp_path, "adamw", lacks):
        assert text.startswith("on the other mesh the losses differ by")


def test_a_reloaded_model_whose_loss_is_nan_differs(run_on_ranks, tmp_path):
    (text,) = run_on_ranks(run, 1, tmp_path, "sgd", None, math.nan)
    assert text.startswith("on the other mesh the losses differ by nan")
