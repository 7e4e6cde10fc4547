"""The example as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mmm.history
from mmm.errors import UserError
from mmm.examples.moe import Config, train
from mmm.models.transformer import Transformer
from mmm.parallel import Layout, apply, build_mesh
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.device import Precision
from mmm.trainer.optimizer import make_optimizer

LAUNCH = str(Path(sys.executable).parent / "launch")


@pytest.mark.long
@pytest.mark.parametrize(("flags", "layout"), [(["--ep", "2"], "dp4·ep2"), (["--ep", "2", "--tp", "2"], "dp2·tp2·ep2")])
def test_same_losses_as_on_one_device(tmp_path, flags, layout):
    flags += ["--seq_length", "32", "--global_batch_size", "8", "--eval_batches", "1", "--dtype", "fp64"]
    flags += ["--max_iters", "4", "--no-plots", "--outdir", str(tmp_path / "four")]
    command = [LAUNCH, "-n", "4", "--device", "cpu", "python3", "-m", "mmm.examples.moe", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"layout {layout}" in done.stdout
    assert "dim 0 over ep, then expert_dp" in done.stdout
    assert "Warning" not in done.stderr
    sizes = {"seq_length": 32, "global_batch_size": 8, "eval_batches": 1}
    train(Config(**sizes, outdir=tmp_path / "one", max_iters=4, dtype="fp64", plots=False))
    one, four = (mmm.history.load(tmp_path / name) for name in ("one", "four"))
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)
    np.testing.assert_allclose(one.val_loss, four.val_loss, rtol=1e-9)
    assert one.imbalance.values.tolist() == four.imbalance.values.tolist()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"ep": 3}, "ep 3 does not divide dp_shard 4"),
        ({"ep": 4, "n_experts": 6}, "n_experts 6 is not divisible by ep 4"),
        ({"ep": 0}, "ep 0: it is at least 1"),
        ({"top_k": 9}, "top_k is 9: a token goes to at least 1 and at most all n_experts 8"),
        ({"n_experts": 0}, "--n_experts 0"),
        ({"balance_rate": -1.0}, "--balance_rate -1.0"),
        ({"tpsize": 3}, "tp 3 needs a multiple of 3 ranks"),
        ({"tpsize": 2, "compile": True}, "compile with tp 2"),
    ],
    ids=str,
)
def test_refused_before_any_process_group(monkeypatch, config, words):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("mmm.trainer.run.process_group", lambda *_: pytest.fail("a process group was made"))
    with pytest.raises(UserError, match=re.escape(words)):
        train(Config(**config))


def test_ranks_of_the_default():
    sizes = {(ranks, tp): Config(tpsize=tp).layout(ranks).ep for ranks, tp in [(1, 1), (3, 1), (4, 1), (4, 2), (4, 4)]}
    assert sizes == {(1, 1): 1, (3, 1): 1, (4, 1): 2, (4, 2): 2, (4, 4): 1}


def optimizers(rank):
    found = []
    for layout in (Layout(dp_shard=2), Layout(dp_shard=2, ep=2)):
        with torch.device("meta"):
            model = Transformer(Config().model_config(256))
        apply(model, build_mesh(layout, "cpu", 30), transformer_plan(), Precision("fp32", torch.float32, torch.float32))
        found.append([make_optimizer(name, model.parameters(), 0.1).defaults["foreach"] for name in ("sgd", "adamw")])
    return found


def test_parameters_of_two_meshes_are_not_updated_at_once(run_on_ranks):
    assert run_on_ranks(optimizers, 2) == [[[None, None], [False, False]]] * 2
