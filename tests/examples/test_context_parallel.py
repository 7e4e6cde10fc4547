"""The example as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmm.history
from mmm.errors import UserError
from mmm.examples.context_parallel import Config, train

LAUNCH = str(Path(sys.executable).parent / "launch")


@pytest.mark.long
def test_same_losses_as_on_one_device(tmp_path):
    """cp2·tp2 by a ring, against a process that nothing started as a rank."""
    flags = ["--preset", "debug", "--seq_length", "32", "--global_batch_size", "4", "--eval_batches", "1"]
    flags += ["--dtype", "fp64", "--max_iters", "3", "--tp", "2", "--outdir", str(tmp_path / "four")]
    command = [LAUNCH, "-n", "4", "--device", "cpu", "python3", "-m", "mmm.examples.context_parallel", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "layout cp2·tp2" in done.stdout
    assert "dim 1 over tp, dim 0 over dp_shard_cp" in done.stdout
    assert "Warning" not in done.stderr
    sizes = {"preset": "debug", "seq_length": 32, "global_batch_size": 4, "eval_batches": 1}
    train(Config(**sizes, outdir=tmp_path / "one", max_iters=3, dtype="fp64"))
    one, four = (mmm.history.load(tmp_path / name) for name in ("one", "four"))
    np.testing.assert_allclose(one.loss, four.loss, rtol=1e-9)
    np.testing.assert_allclose(one.val_loss, four.val_loss, rtol=1e-9)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"seq_length": 60}, "seq_length 60 is not divisible by 2 · cp 4 = 8"),
        ({"cp_style": "ulysses", "n_heads": 2, "n_kv_heads": 2}, "n_heads 2 is not divisible by cp 4"),
        ({"cp": 0}, "cp 0: an axis of the mesh has at least 1 rank"),
        ({"cp": 3}, "cp 3 needs a multiple of 3 ranks, and there are 4"),
        ({"compile": True}, "compile with cp 4"),
    ],
    ids=str,
)
def test_refused_before_any_process_group(monkeypatch, config, words):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("mmm.trainer.run.process_group", lambda *_: pytest.fail("a process group was made"))
    with pytest.raises(UserError, match=re.escape(words)):
        train(Config(**config))
