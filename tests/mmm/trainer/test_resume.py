"""A run that ends in the middle and goes on is the run that did not: to the last bit, or on another layout to 1e-9."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch

import mmm.history
from mmm.checkpoint.manifest import FileSum, read_manifest
from mmm.checkpoint.objects import decode
from mmm.checkpoint.saver import Saver
from mmm.data.text.prepare import Preparation, prepare
from mmm.errors import ConfigError
from mmm.history.record.dataset import marks_of
from mmm.history.record.folder import JOURNAL
from mmm.history.record.journal import read_journal
from mmm.run import options as groups
from mmm.run.options import check_resume
from mmm.runtime.stop import stop_signal
from mmm_lab.runs.diverge import diverge
from support.clock import long
from support.disk import CAN_MOUNT, small_disk
from support.resuming import curve, tensors, train, train_in_turn

# Of a run in one go; of a checkpoint; where the first part ends, two steps after a checkpoint.
STEPS, EVERY, ENDS = 8, 4, 6
LM = "mmm.trainer.lm"
FSDP = "mmm.trainer.cnn"
VIT = "mmm.trainer.vit"
# A small language model, which every layout divides.
TEXT = {
    "preset": "debug",
    "dim": 32,
    "ffn_dim": 48,
    "seq_length": 16,
    "global_batch_size": 8,
    "dtype": "fp64",
    "max_iters": STEPS,
    "checkpoint_every": EVERY,
    "eval_batches": 1,
    "eval_every": 3,
}
MOE = {"n_experts": 4, "expert_dim": 24}
DIGITS = {"dataset": "digits", "global_batch_size": 72, "max_iters": 24, "checkpoint_every": 5, "workers": 0}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{i * i % 97} and {i}, " for i in range(4000)))
    return (path,)


def begin(run_on_ranks, program, ranks, flags, folder, ends_at=ENDS, goes_on=False):
    """A run in one go, and one that ends in the middle; which then may go on."""
    one = folder / "one"
    two = folder / "two"
    runs = [({**flags, "outdir": one}, None), ({**flags, "outdir": two}, ends_at)]
    runs += [({**flags, "outdir": two, "resume": Path("auto")}, None)] * goes_on
    ended = run_on_ranks(train_in_turn, ranks, program, runs, timeout=240)
    assert ended == [["", "ended", ""][: len(runs)]] * ranks
    return one, two


def go_on(run_on_ranks, program, ranks, flags, folder, resume="auto", **more):
    options = {**flags, "outdir": folder, "resume": Path(resume), **more}
    return run_on_ranks(train, ranks, program, options, timeout=120)


def same_bits(one, two, steps=STEPS, name="loss"):
    assert curve(one, name) == curve(two, name)
    a = tensors(one / f"checkpoints/step-{steps}")
    b = tensors(two / f"checkpoints/step-{steps}")
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key])
    states = [read_manifest(folder / f"checkpoints/step-{steps}").state for folder in (one, two)]
    assert states[0] == states[1]


# Resumed on the layout that they began on.
LAYOUTS = [
    pytest.param(1, {}, id="one device"),
    pytest.param(
        4, {"tpsize": 2, "microbatches": 2, "dtype": "fp32"}, id="dp2·tp2, accumulated", marks=pytest.mark.long
    ),
    pytest.param(4, {"pp": 2, "optimizer": "muon"}, id="pp2·dp2, Muon", marks=pytest.mark.long),
    pytest.param(4, {"ep": 2, **MOE}, id="dp4·ep2", marks=pytest.mark.long),
    pytest.param(
        2,
        {"pp": 2, "schedule": "ZBVZeroBubble", "tie_word_embeddings": True},
        id="pp2, tied",
        marks=pytest.mark.long,
    ),
    pytest.param(2, {"dtype": "fp16", "parallel": "ddp", **MOE}, id="ddp, fp16, experts", marks=pytest.mark.long),
    pytest.param(2, {"parallel": "zero1"}, id="zero1", marks=pytest.mark.long),
]


@pytest.mark.long
def test_fingerprints_go_on(run_on_ranks, tmp_path, text):
    flags = {**TEXT, "text": text, "fingerprints": 3}
    one, two = begin(run_on_ranks, LM, 1, flags, tmp_path, goes_on=True)
    result = diverge(one, two)
    assert result.step is None
    # Fingerprints of step 6, which the second part made.
    assert 6 in result.largest


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_to_the_last_bit(run_on_ranks, tmp_path, text, ranks, layout):
    flags = {**TEXT, "text": text, **layout}
    one, two = begin(run_on_ranks, LM, ranks, flags, tmp_path, goes_on=True)
    same_bits(one, two)
    assert sorted(os.listdir(two / "checkpoints")) == [f"step-{EVERY}", f"step-{STEPS}"]
    if "n_experts" in layout:
        saved = tensors(two / f"checkpoints/step-{EVERY}")
        assert any(tensor.any() for name, tensor in saved.items() if "bias" in name)
    if layout.get("dtype") == "fp16":
        objects = read_manifest(two / f"checkpoints/step-{STEPS}").state["objects"]
        assert decode(objects["scaler"]["state"], {})["_growth_tracker"] == STEPS


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"tpsize": 2}), (4, {"pp": 2, "loss_chunks": 2})],
    ids=str,
)
@pytest.mark.long
def test_packed_documents(run_on_ranks, tmp_path, text, ranks, layout):
    """To the last bit; and on another layout."""
    prepare(Preparation(text, tmp_path / "tokens", separator=","), 1)
    flags = {**TEXT, "text": (tmp_path / "tokens",), "pack": True, "document_mask": True, **layout}
    one, two = begin(run_on_ranks, LM, ranks, flags, tmp_path)
    shutil.copytree(two, tmp_path / "elsewhere")
    shutil.copytree(two, tmp_path / "older")
    assert go_on(run_on_ranks, LM, ranks, flags, two) == [""] * ranks
    same_bits(one, two)
    plain = {name: value for name, value in flags.items() if name not in layout}
    assert go_on(run_on_ranks, LM, 1, plain, tmp_path / "elsewhere") == [""]
    assert curve(tmp_path / "elsewhere") == pytest.approx(curve(one), rel=1e-9)
    (refused, *_) = go_on(run_on_ranks, LM, 1, {**plain, "document_mask": False, "max_iters": 99}, two)
    assert "--document_mask" in refused
    (path,) = (tmp_path / "older/checkpoints").iterdir()
    manifest = read_manifest(path)
    # As a checkpoint of before that order had a name.
    del manifest.identity["order of packed samples"]
    manifest.write(path)
    (refused, *_) = go_on(run_on_ranks, LM, 1, plain, tmp_path / "older")
    assert "order of packed samples" in refused
    assert json.loads((one / "config.json").read_text())["data"]["documents"] == ["pack", "document_mask"]


def counted(rank, flags):
    """At each save, the rows that the checkpoint counts, and those on the disk."""
    order, right = [], Saver.save

    def save(self, state, manifest):
        order.append((manifest.state["rows"], len(read_journal(self.folder.parent / JOURNAL).rows)))
        right(self, state, manifest)

    with patch.object(Saver, "save", save):
        assert train(rank, LM, flags) == ""
    return order


def test_the_rows_that_a_checkpoint_counts_are_on_the_disk(run_on_ranks, tmp_path, text):
    flags = {**TEXT, "text": text, "n_layers": 1, "max_iters": 8, "checkpoint_every": 4, "outdir": tmp_path}
    assert run_on_ranks(counted, 1, flags) == [[(4, 4), (8, 8)]]


@CAN_MOUNT
def test_a_folder_that_is_read_only(run_on_ranks, tmp_path, text):
    with small_disk(tmp_path, "ro"):
        by_rank = run_on_ranks(train, 2, LM, {**TEXT, "text": text, "outdir": tmp_path / "run"})
    expected = f"cannot make the folder {tmp_path}/run: Read-only file system. Give an --outdir you may write to."
    assert by_rank == [expected] * 2


@pytest.mark.long
def test_a_row_that_another_layout_has_begun(run_on_ranks, tmp_path):
    """An epoch's loss, the first part of which is of two ranks that share their samples."""
    one, two = begin(run_on_ranks, FSDP, 2, {**DIGITS, "tpsize": 2}, tmp_path)
    assert go_on(run_on_ranks, FSDP, 1, DIGITS, two) == [""]
    assert curve(two, "train_loss") == pytest.approx(curve(one, "train_loss"), rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.long
def test_an_exact_run_goes_on_elsewhere_to_the_last_bit(run_on_ranks, tmp_path, text, dtype):
    flags = {**TEXT, "text": text, "exact": 4, "dtype": dtype}
    one, two = begin(run_on_ranks, LM, 2, flags, tmp_path)
    for name, ranks, layout in (("one", 1, {}), ("dp4", 4, {}), ("pp2", 2, {"pp": 2})):
        elsewhere = tmp_path / f"on {name}"
        shutil.copytree(two, elsewhere)
        assert go_on(run_on_ranks, LM, ranks, {**flags, **layout}, elsewhere) == [""] * ranks
        for column in ("loss", "grad_norm"):
            assert curve(one, column) == curve(elsewhere, column)
        last = f"checkpoints/step-{STEPS}"
        # Weights, and the state of AdamW.
        expected = tensors(one / last)
        saved = tensors(elsewhere / last)
        assert expected.keys() == saved.keys()
        for key in expected:
            assert torch.equal(expected[key], saved[key])
    (refused, *_) = go_on(run_on_ranks, LM, 1, {**flags, "exact": 8}, two)
    assert "--exact 4.1.1 there, 8.1.1 here" in refused
    (refused, *_) = go_on(run_on_ranks, LM, 1, {**flags, "exact": None}, two)
    assert "--exact 4.1.1 there, none here" in refused
    assert json.loads((one / "config.json").read_text())["techniques"]["exact"] == 4


# Resumed on these, from dp4·ep2.
ELSEWHERE = [
    pytest.param(1, {}, id="one device", marks=pytest.mark.long),
    pytest.param(4, {"pp": 2, "tpsize": 2}, id="pp2·tp2", marks=pytest.mark.long),
    pytest.param(4, {"pp": 2, "ep": 2}, id="pp2·dp2·ep2", marks=pytest.mark.long),
    pytest.param(4, {"parallel": "zero1", "tpsize": 2, "ep": 2}, id="zero1-tp-ep"),
    pytest.param(4, {"cp": 2, "cp_style": "ulysses", "tpsize": 2}, id="cp2·tp2", marks=pytest.mark.long),
    pytest.param(2, {"offload": True, "ep": 2}, id="dp2·ep2 on the host", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def begun(request, tmp_path_factory, text):
    """A run on dp4·ep2 that has ended after step `EVERY`, and one that has not."""
    from mmm_verify.testing.plugin import _pool

    flags = {**TEXT, "text": text, **MOE}
    folder = tmp_path_factory.mktemp("begun")
    one, two = begin(_pool(request.config).run, LM, 4, {**flags, "ep": 2}, folder)
    return flags, one, two / f"checkpoints/step-{EVERY}"


@pytest.mark.parametrize(("ranks", "layout"), ELSEWHERE)
def test_on_another_layout(run_on_ranks, tmp_path, begun, ranks, layout):
    flags, one, checkpoint = begun
    assert go_on(run_on_ranks, LM, ranks, {**flags, **layout}, tmp_path, checkpoint) == [""] * ranks
    ds = mmm.history.load(tmp_path)
    assert ds["iter"].values.tolist() == list(range(EVERY, STEPS))
    assert ds["loss"].values.tolist() == pytest.approx(curve(one)[EVERY:], rel=1e-9)
    resumed, expected = (tensors(path / f"checkpoints/step-{STEPS}") for path in (tmp_path, one))
    for name, tensor in resumed.items():
        if "bias" in name:
            assert torch.equal(tensor, expected[name])
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_a_tied_weight_on_another_layout(run_on_ranks, tmp_path, text):
    """From one parameter to two stages of one rank, and back to one."""
    flags = {**TEXT, "text": text, "tie_word_embeddings": True, "checkpoint_every": 2}
    one, two = begin(run_on_ranks, LM, 2, flags, tmp_path, ends_at=5)
    assert "output.weight" not in tensors(two / "checkpoints/step-4")
    v = {**flags, "pp": 2, "schedule": "ZBVZeroBubble", "outdir": two, "resume": Path("auto")}
    assert run_on_ranks(train, 2, LM, v, 7, timeout=120) == ["ended"] * 2
    assert "output.weight" not in tensors(two / "checkpoints/step-6")
    assert go_on(run_on_ranks, LM, 1, flags, two) == [""]
    assert curve(two) == pytest.approx(curve(one), rel=1e-9)


# --- what is refused, in one line -------------------------------------------------------------------------------------


def refused(run_on_ranks, flags, folder, resume, *messages, ranks=2, **more):
    texts = go_on(run_on_ranks, LM, ranks, flags, folder, resume, **more)
    assert len(set(texts)) == 1
    for word in messages:
        assert word in texts[0]
    assert "\n" not in texts[0]


def test_refused(run_on_ranks, tmp_path, begun):
    flags, _, path = begun
    new = tmp_path / "new"
    refused(run_on_ranks, flags, new, path, "dim 32 there, 64 here; ffn_dim 48 there, 96 here", dim=64, ffn_dim=96)
    refused(run_on_ranks, flags, tmp_path / "b", path, "n_experts 4 there, 0 here", n_experts=0, expert_dim=None)
    refused(run_on_ranks, flags, tmp_path / "c", path, "data text there, random here", dataset="random", text=())
    refused(run_on_ranks, flags, tmp_path / "d", path, "global_batch_size 8 there, 4 here", global_batch_size=4)
    refused(run_on_ranks, flags, tmp_path / "e", path, f"step {EVERY}, and the run has {EVERY}: no", max_iters=EVERY)
    refused(run_on_ranks, flags, tmp_path / "f", tmp_path, f"--resume {tmp_path}: no checkpoint is there")
    refused(
        run_on_ranks, flags, tmp_path / "g", "auto", "--checkpoint_every 0: it must be at least 1", checkpoint_every=0
    )
    (tmp_path / "h").mkdir()
    (tmp_path / "h/checkpoints").write_text("in the way")
    refused(run_on_ranks, flags, tmp_path / "h", "auto", "h/checkpoints is a file")


def test_flags_that_contradict_each_other():
    checkpoint = groups.CheckpointFlags(resume=Path("auto"), checkpoint_every=1)
    with pytest.raises(ConfigError, match="--resume and --overwrite"):
        check_resume(checkpoint, groups.RunFlags(overwrite=True, outdir=Path("a")))
    with pytest.raises(ConfigError, match="--resume auto without --outdir"):
        check_resume(checkpoint, groups.RunFlags())


@pytest.mark.parametrize("program", [LM, long(FSDP), long(VIT)])
def test_a_run_cut_after_its_last_step_ends_once_more(run_on_ranks, tmp_path, program):
    """As one that was killed while it saved its model or made its plots."""
    flags = {
        LM: {**TEXT, "dataset": "random"},
        FSDP: DIGITS,
        VIT: {"preset": "debug", "batch_size": 8, "dtype": "fp64", "eval_every": 0},
    }[program] | {"max_iters": 3, "checkpoint_every": 2, "outdir": tmp_path}
    flags.pop("epochs", None)
    assert run_on_ranks(train, 2, program, flags) == ["", ""]
    before = mmm.history.load(tmp_path)
    weights = tensors(tmp_path / "checkpoints/step-3")
    flags |= {"resume": Path("auto"), "save_model": True}
    assert run_on_ranks(train, 2, program, flags) == ["", ""]
    after = mmm.history.load(tmp_path)
    for name in before.data_vars:
        numpy.testing.assert_array_equal(after[name].values, before[name].values)
    notes = json.loads((tmp_path / "config.json").read_text())["notes"]
    assert any("no step is left" in note for note in notes)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved
    assert all(torch.equal(saved[name], weights[name]) for name in saved)
    assert after.attrs["state"] == "finished"


def test_a_folder_with_checkpoints_is_not_mixed_up(run_on_ranks, tmp_path, begun):
    flags, _, path = begun
    options = {**flags, "outdir": path.parent.parent, "overwrite": True}
    for text in run_on_ranks(train, 2, LM, options):
        assert f"has checkpoints of an earlier run (step-{EVERY} is the newest)" in text
        assert "--overwrite" in text
    assert path.exists()


def test_from_the_beginning_where_there_is_no_checkpoint(run_on_ranks, tmp_path, text):
    flags = {**TEXT, "text": text, "max_iters": 4, "checkpoint_every": 3}
    assert go_on(run_on_ranks, LM, 1, flags, tmp_path) == [""]
    assert len(curve(tmp_path)) == 4
    assert marks_of(mmm.history.load(tmp_path)) == []


@pytest.mark.long
def test_the_newest_whole_one_is_taken(run_on_ranks, tmp_path, text):
    flags = {**TEXT, "text": text, "checkpoint_every": 2, "keep": 3}
    one, two = begin(run_on_ranks, LM, 2, flags, tmp_path, ends_at=7)
    file = two / "checkpoints/step-6/__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-9] + b"flip" + content[-5:])
    refused(run_on_ranks, flags, tmp_path / "x", file.parent, f"{file} is damaged: its checksum")
    assert go_on(run_on_ranks, LM, 2, flags, two) == ["", ""]
    same_bits(one, two)
    assert [mark["step"] for mark in marks_of(mmm.history.load(two))] == [4]
    notes = json.loads((two / "config.json").read_text())["notes"]
    older = two / "checkpoints/step-6"
    refused(run_on_ranks, flags, two, older, f"--resume {older}: step-8 is newer, and the run's folder would have two")
    assert any(note.startswith(f"{file} is damaged") and "the checkpoint before it is taken" in note for note in notes)


def test_none_is_whole(run_on_ranks, tmp_path, text):
    flags = {**TEXT, "text": text, "max_iters": 4, "checkpoint_every": 2}
    begin(run_on_ranks, LM, 1, flags, tmp_path, ends_at=3)
    os.remove(tmp_path / "two/checkpoints/step-2/.metadata")
    (message,) = go_on(run_on_ranks, LM, 1, flags, tmp_path / "two")
    assert message == f"no checkpoint is whole: {tmp_path}/two/checkpoints/step-2/.metadata is missing"


# --- a signal ---------------------------------------------------------------------------------------------------------


def stopped(rank, flags, signum, stop_step, ahead=False):
    """A run that a signal comes to on rank 1 alone, while it makes a step; its exit code on this rank.

    Args:
        ahead: whether the host is taken to be ahead of the device.
    """

    def step(seed, step, coordinate):
        if step == stop_step and rank.rank == 1:
            os.kill(os.getpid(), signum)

    event = torch.cpu.Event if ahead else None
    with (
        patch("support.resuming.before_step", step),
        patch("mmm.run.checkpoints.event_class", lambda _: event),
    ):
        try:
            return train(rank, LM, flags)
        except SystemExit as ended:
            return ended.code


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "ahead"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGUSR1, True)]
)
def test_a_signal_on_one_rank_ends_the_run_after_the_step(run_on_ranks, tmp_path, text, signum, ahead):
    """After the next one, where the host is ahead of the device."""
    flags = {**TEXT, "text": text}
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_on_ranks(train, 2, LM, {**flags, "outdir": one}) == ["", ""]
    before = signal.getsignal(signum)
    assert run_on_ranks(stopped, 2, {**flags, "outdir": two}, signum, 2 - ahead, ahead) == [75, 75]
    assert signal.getsignal(signum) == before
    assert os.listdir(two / "checkpoints") == ["step-3"]
    assert len(curve(two)) == 3
    ds = mmm.history.load(two)
    assert (ds.attrs["state"], ds.attrs["error"]) == ("interrupted", "a signal; the state is saved")
    assert go_on(run_on_ranks, LM, 2, flags, two) == ["", ""]
    same_bits(one, two)


def stopped_without_a_checkpoint(rank, flags):
    wrong = patch("mmm.checkpoint.storage.file_sum", lambda path: FileSum(0, ""))
    with wrong:
        return stopped(rank, flags, signal.SIGTERM, 2)


@pytest.mark.parametrize("mode", ["blocking", "async"])
def test_a_signal_whose_checkpoint_fails(run_on_ranks, tmp_path, text, mode):
    """The exit code that says "go on from here" would be a lie, also where the loop has heard of the failure before."""
    flags = {**TEXT, "text": text, "outdir": tmp_path / "run", "checkpoint_mode": mode}
    assert run_on_ranks(stopped_without_a_checkpoint, 2, flags) == [1, 1]
    notes = json.loads((tmp_path / "run/config.json").read_text())["notes"]
    assert notes[-1] == "stopped by a signal after 3 steps"


def test_the_signal_before_a_jobs_end_that_comes_when_the_run_is_over():
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with stop_signal() as wish:
            pass
        # Else this process is killed by it.
        signal.raise_signal(signal.SIGUSR1)
        assert wish.came is None
    finally:
        signal.signal(signal.SIGUSR1, before)
