"""Checkpoints of before, as mmm wrote them then: a run goes on from them to the last bit."""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mmm.checkpoint.manifest import Manifest, read_manifest
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.storage import Reader, read_metadata
from support import own_loop
from support.own_loop import flags_of
from support.resuming import curve, train

LM = {
    "preset": "debug",
    "dim": 32,
    "ffn_dim": 48,
    "seq_length": 16,
    "global_batch_size": 4,
    "max_iters": 4,
    "checkpoint_every": 2,
    "eval_batches": 1,
}


def rewrite(folder: Path, into: Path, state: dict, tensors=lambda tensors: tensors) -> None:
    """Save a checkpoint once more, with another state in its manifest."""
    manifest = read_manifest(folder)
    saved: dict = {}
    reader = Reader(folder, read_metadata(folder, manifest.files))
    _load_state_dict(saved, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    failed = []
    saver = Saver(into, dist.new_group(backend="gloo"), 2, failed.append)
    rows = manifest.state["rows"]
    saver.save(tensors(saved), Manifest(manifest.step, manifest.identity, {"rows": rows, **state}, manifest.about, {}))
    assert saver.wait(), failed


def trainers_of_before(saved: dict) -> dict:
    """One model and one optimizer, whose moments were under the parameters' own names."""
    moments = {name.removeprefix("model."): kept for name, kept in saved["optimizer"].items()}
    assert all(kept["exp_avg"].any() for kept in moments.values())
    return {"model": saved["model"], "optimizer": moments}


def of_a_trainer(rank, folder):
    flags = {**LM, "outdir": folder / "one"}
    assert train(rank, "mmm.trainer.lm", flags) == ""
    state = {"scaler": {}, "lr": 0.001, "since": 0, "counted": 0.0, "losses": [], "loss_ranks": []}
    rewrite(folder / "one/checkpoints/step-2", folder / "old/checkpoints", state, trainers_of_before)
    return train(rank, "mmm.trainer.lm", {**flags, "outdir": folder / "two", "resume": folder / "old"})


def test_a_trainers(run_on_ranks, tmp_path):
    assert run_on_ranks(of_a_trainer, 1, tmp_path) == [""]
    assert curve(tmp_path / "two") == curve(tmp_path / "one")[2:]


def of_a_script(rank, folder):
    assert own_loop.train(rank, flags_of(folder / "one")) == ""
    state = read_manifest(folder / "one/checkpoints/step-3").state
    objects = state["objects"]
    for name in ("generator", "critic"):
        objects[name]["shapes"] = {"up.weight": [8, 6]}
    (group,) = objects["opt_g"]["groups"]
    # All values of the optimizer were there, whoever had changed them.
    group["values"] |= {"betas": {"tuple": [0.9, 0.999]}, "eps": 1e-8, "weight_decay": 0.01, "initial_lr": 0.05}
    state_of_before = {"samples": state["samples"], "objects": objects}
    rewrite(folder / "one/checkpoints/step-3", folder / "old/checkpoints", state_of_before)
    return own_loop.train(rank, flags_of(folder / "two", resume=folder / "old"))


def test_a_scripts(run_on_ranks, tmp_path):
    assert run_on_ranks(of_a_script, 1, tmp_path) == [""]
    for name in ("loss", "lr", "tally"):
        assert curve(tmp_path / "two", name) == curve(tmp_path / "one", name)[3:]
