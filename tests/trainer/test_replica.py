"""`--replica`: a run goes on from the copy in memory as if it had not ended; from a checkpoint where it is damaged."""

import json
from pathlib import Path

import pytest

from mmm.checkpoint import steps_of
from mmm.contract import MEMORY_VARIABLE
from mmm.errors import ConfigError
from mmm.trainer.config.command_line import configure
from mmm.trainer.lm import Config
from mmm.trainer.run import resume
from support.resuming import curve, tensors, train

LM, CNN = "mmm.trainer.lm", "mmm.trainer.cnn"
STEPS, EVERY, REPLICA, ENDS = 8, 4, 3, 7  # the last copy is of step 6, the last checkpoint of step 4
FLAGS = {"max_iters": STEPS, "checkpoint_every": EVERY, "replica": REPLICA, "dtype": "fp64"}
TEXT = {
    **FLAGS,
    "preset": "debug",
    "dataset": "random",
    "dim": 32,
    "ffn_dim": 48,
    "vocab_size": 64,
    "seq_length": 16,
    "global_batch_size": 8,
    "eval_batches": 1,
}
MOE = {"n_experts": 4, "expert_dim": 24}
DIGITS = {**FLAGS, "dataset": "digits", "global_batch_size": 72, "workers": 0}


@pytest.fixture
def memory(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def run(run_on_ranks, program, ranks, flags, folder, memory, ends_at=None):
    given = {**flags, "outdir": folder, "resume": Path("auto")}
    return run_on_ranks(train, ranks, program, given, ends_at, memory, timeout=120)


def notes(folder):
    return json.loads((folder / "config.json").read_text())["notes"]


def begin(run_on_ranks, program, ranks, flags, tmp_path, memory):
    """A run in one go, and one that ends in the middle."""
    one, two, elsewhere = tmp_path / "one", tmp_path / "two", tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(run_on_ranks, program, ranks, flags, one, elsewhere) == [""] * ranks
    assert run(run_on_ranks, program, ranks, flags, two, memory, ENDS) == ["ended"] * ranks
    assert [path.name for path in steps_of(memory)] == ["step-6"]
    return one, two


def same_bits(one, two):
    assert curve(one) == curve(two)
    a, b = (tensors(folder / f"checkpoints/step-{STEPS}") for folder in (one, two))
    assert a.keys() == b.keys()
    assert all(a[key].equal(b[key]) for key in a)


@pytest.mark.parametrize(
    ("program", "ranks", "flags"),
    [
        pytest.param(LM, 1, TEXT, id="one device"),
        pytest.param(LM, 4, TEXT | {"tpsize": 2, **MOE}, id="dp2·tp2, experts", marks=pytest.mark.long),
        pytest.param(LM, 4, TEXT | {"pp": 2}, id="pp2·dp2", marks=pytest.mark.long),
        pytest.param(LM, 2, TEXT | {"parallel": "zero2"}, id="zero2", marks=pytest.mark.long),
        pytest.param(LM, 2, TEXT | {"parallel": "ddp", "dtype": "fp16", **MOE}, id="fp16", marks=pytest.mark.long),
        pytest.param(CNN, 2, DIGITS, id="CNN, in an epoch", marks=pytest.mark.long),
    ],
)
def test_to_the_last_bit(run_on_ranks, tmp_path, memory, program, ranks, flags):
    one, two = begin(run_on_ranks, program, ranks, flags, tmp_path, memory)
    assert run(run_on_ranks, program, ranks, flags, two, memory) == [""] * ranks
    assert "resumed from a copy in memory at step 6" in notes(two)
    if program == LM:
        same_bits(one, two)
    else:
        assert curve(one, "train_loss") == curve(two, "train_loss")


@pytest.mark.long
def test_on_another_layout(run_on_ranks, tmp_path, memory):
    one, two = begin(run_on_ranks, LM, 4, TEXT, tmp_path, memory)
    assert run(run_on_ranks, LM, 2, TEXT | {"tpsize": 2}, two, memory) == [""] * 2
    assert "resumed from a copy in memory at step 6, saved on the layout dp4" in notes(two)
    assert curve(two) == pytest.approx(curve(one), rel=1e-9)


@pytest.mark.long
def test_a_flipped_bit(run_on_ranks, tmp_path, memory):
    one, two = begin(run_on_ranks, LM, 2, TEXT, tmp_path, memory)
    path = memory / "step-6/__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(run_on_ranks, LM, 2, TEXT, two, memory) == [""] * 2
    said = notes(two)
    damaged = "is damaged: its checksum is not the one that was written: the checkpoint before it is taken"
    assert f"{path} {damaged}" in said
    assert f"resumed from {two}/checkpoints/step-4 at step 4" in said
    same_bits(one, two)


def test_memory_that_is_full(run_on_ranks, tmp_path, memory):
    """Training goes on; it is said once."""
    memory.rmdir()
    memory.write_text("no folder")
    assert run(run_on_ranks, LM, 1, TEXT, tmp_path / "one", memory) == [""]
    (said,) = [note for note in notes(tmp_path / "one") if "no copy" in note]
    assert said.startswith("no copy in memory of step 3: ")


def test_no_memory_outlives_the_ranks(monkeypatch):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    config = configure(Config, replica=5, checkpoint_every=10)
    with pytest.raises(ConfigError) as error:
        resume.prepare("lm", config.run, config.checkpoint, None)
    assert str(error.value) == (
        "--replica 5: no memory here outlives the ranks; start them by launch --elastic MIN:MAX, or on this host alone "
        "by launch --retries N, where the system has /dev/shm"
    )
