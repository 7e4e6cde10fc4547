"""``--text_weights``: the same losses on every mesh, also of a run that is resumed on another one."""

import numpy as np
import pytest

from mmm.run.command_line import configure
from mmm.trainer import lm
from support.pool import program_on
from support.resuming import curve

FLAGS = {
    "preset": "debug",
    "text_weights": (0.7, 0.3),
    "seq_length": 16,
    "global_batch_size": 4,
    "max_iters": 6,
    "dtype": "fp64",
    "device": "cpu",
    "plots": False,
    "optimizer": "sgd",
    "warmup": 0,
    "eval_every": 3,
    "eval_batches": 2,
}


def run(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **{**FLAGS, **flags, "outdir": outdir}))


@pytest.mark.long
def test_the_same_losses_on_every_mesh_and_after_it_is_resumed(run_on_ranks, tmp_path):
    texts = (tmp_path / "a.txt", tmp_path / "b.txt")
    texts[0].write_text("".join(f"{n} and " for n in range(200)))
    texts[1].write_text("".join(f"or {n * n}. " for n in range(400)))
    flags = {"text": texts}
    lm.train(configure(lm.Config, **{**FLAGS, **flags, "outdir": tmp_path / "alone"}))
    expected = curve(tmp_path / "alone")
    run_on_ranks(run, 2, tmp_path / "run", {**flags, "checkpoint_every": 2, "keep": 3})
    np.testing.assert_allclose(curve(tmp_path / "run"), expected, rtol=1e-9)
    # On two ranks until there, and on one from there.
    again = {**flags, "resume": tmp_path / "run" / "checkpoints" / "step-2"}
    with pytest.raises(Exception, match="data's sha256"):
        run_on_ranks(run, 2, tmp_path / "wrong", {**again, "text_weights": (0.6, 0.4)})
    lm.train(configure(lm.Config, **{**FLAGS, **again, "outdir": tmp_path / "again"}))
    np.testing.assert_allclose(curve(tmp_path / "again"), expected[2:], rtol=1e-9)
