"""What an example writes out is what `mmm.parallel` does, can be copied, and each of its mistakes shows."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

import mmm.examples
from mmm.comparison import relative_error, worst
from mmm.examples import ddp, fsdp, fsdp_tp, hsdp, zero
from mmm.examples._support import mistakes
from mmm.models.cnn.model import CNN, CNNConfig
from mmm.models.cnn.plan import cnn_plan
from mmm.models.llama.model import PRESETS, Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.nn.init import canonical_name
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.run.command_line import configure, for_a_few_steps
from mmm.runtime.device import choose_precision
from support.programs import run_program
from support.runs import make_run

CPU = torch.device("cpu")
F64 = choose_precision("fp64", CPU)
# SAMPLES: of the global batch.
STEPS, SAMPLES, SEED = 3, 8, 5
# example, --parallel → the layout of 4 ranks, and what `parallelize` calls it
CASES = {
    "fsdp_tp": (Layout(dp_shard=2, tp=2), "fsdp"),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2), "hsdp"),
    "ddp": (Layout(dp_shard=4), "ddp"),
    "zero1": (Layout(dp_shard=4), "zero1"),
    "zero2": (Layout(dp_shard=4), "zero2"),
    "cnn ddp": (Layout(dp_shard=4), "ddp"),
    "cnn fsdp": (Layout(dp_shard=4), "fsdp"),
}


def full(name):
    with torch.device("meta"):
        if name.startswith("cnn"):
            return CNN(CNNConfig(image_size=12, width1=4, width2=8, hidden=32, conv_dropout=0, fc_dropout=0)).double()
        return Transformer(PRESETS["debug"]).double()


def run_of(rank, layout, **options):
    config = configure(fsdp.Config, seed=SEED, dtype="fp64", lr=0.1, optimizer="sgd", **options)
    return make_run(rank, config, layout, F64)[0]


def written_out(name, rank, layout):
    """The model as the example makes it, with weights; and what its losses are multiplied by."""
    model = full(name)
    if name.startswith("cnn"):
        technique = name.split()[1]
        run = run_of(rank, layout, parallel=technique)
        return fsdp.parallelize(run, model, run.config), layout.dp if technique == "ddp" else 1
    if name == "fsdp_tp":
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp_shard", "tp"))
        fsdp_tp.shard(model, mesh, F64)
    if name == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        hsdp.shard(model, mesh, F64)
    materialize(model, CPU, SEED)
    if name == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True), layout.dp
    if name.startswith("zero"):
        return zero.Slices(model, init_device_mesh("cpu", (layout.dp,)), int(name[-1])), 1
    return model, 1


def taken(name, layout, technique):
    """The same from `mmm.parallel`."""
    plan = cnn_plan() if name.startswith("cnn") else transformer_plan()
    model = parallelize(full(name), build_mesh(layout, "cpu"), plan, F64, data_parallel=technique)
    materialize(model, CPU, SEED)
    return model


def batch_of(name, first, size):
    generator = torch.Generator().manual_seed(1)
    if name.startswith("cnn"):
        inputs = torch.randn(SAMPLES, 1, 12, 12, generator=generator, dtype=torch.float64)
        targets = torch.randint(10, (SAMPLES,), generator=generator)
    else:
        inputs, targets = torch.randint(256, (2, SAMPLES, 16), generator=generator)
    return inputs[first : first + size], targets[first : first + size], targets.numel()


def trained(name, rank, layout, model, factor=1):
    """Losses of this rank, and the full gradients, of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = SAMPLES // layout.dp
    inputs, targets, count = batch_of(name, layout.dp_coordinate(rank.rank) * size, size)
    steps = []
    for _ in range(STEPS):
        with loss_parallel():
            loss = cross_entropy(model(inputs), targets, count)
            (loss * factor).backward()
        gradients = {canonical_name(n): p.grad for n, p in model.named_parameters()}
        gradients = {
            n: (g.full_tensor() if isinstance(g, DTensor) else g).flatten().clone() for n, g in gradients.items()
        }
        steps.append((float(loss.full_tensor() if isinstance(loss, DTensor) else loss), gradients))
        optimizer.step()
        if isinstance(model, zero.Slices):
            model.gather()
        optimizer.zero_grad()
    return steps


def apart(rank, name):
    """The largest relative difference of a loss, or of a gradient's element."""
    layout, technique = CASES[name]
    ours = trained(name, rank, layout, *written_out(name, rank, layout))
    theirs = trained(name, rank, layout, taken(name, layout, technique))
    off = 0.0
    for (loss, gradients), (other, others) in zip(ours, theirs, strict=True):
        assert set(gradients) == set(others)
        off = worst((off, relative_error(loss, other)))
        for parameter, gradient in gradients.items():
            expected = others[parameter]
            # A slice by hand is padded.
            gradient = gradient[: len(expected)]
            off = worst((off, float((gradient - expected).abs().max() / expected.abs().max())))
    return off


LONG = {"hsdp", "zero1", "zero2", "cnn ddp"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES]
)
def test_written_out_is_what_parallel_does(run_on_ranks, name):
    assert worst(run_on_ranks(apart, 4, name)) < 1e-9


TEXT = ["--preset", "debug", "--seq_length", "16", "--global_batch_size", "8"]
EXPERTS = ["--seq_length", "32", "--global_batch_size", "8", "--eval_batches", "1"]
FIELDS = ["--global_batch_size", "2"]
LONGER = ["--preset", "debug", *EXPERTS]
# (example, mistake) → flags of a small run on 4 ranks, and where the mistake shows first
SHOWS = {
    ("fsdp_tp", "averaged"): (["--tpsize", "2", *TEXT], "the gradients of step 0 (tok_embeddings.weight)"),
    ("fsdp_tp", "norms"): (["--tpsize", "2", *TEXT], "the gradients of step 0 (layers.0.ffn_norm.weight)"),
    ("fsdp", "averaged"): (["--dataset", "digits", "--global_batch_size", "16"], "the loss of step 0"),
    ("hsdp", "one_axis"): (TEXT, "the gradients of step 0 (tok_embeddings.weight)"),
    ("hsdp", "own_weights"): (TEXT, "the loss of step 0"),
    ("zero", "no_gather"): (TEXT, "the loss of step 1"),
    ("ddp", "no_all_reduce"): (TEXT, "the gradients of step 0 (tok_embeddings.weight)"),
    ("ddp", "same_samples"): (TEXT, "the loss of step 0"),
    ("moe", "capacity"): (["--ep", "2", *EXPERTS], "the loss of step 0"),
    ("context_parallel", "positions"): (LONGER, "the loss of step 0"),
    ("context_parallel", "triangle"): (LONGER, "the loss of step 0"),
    ("space", "halo"): (FIELDS, "the gradients of step 0 (first.weight)"),
    ("space", "norm"): (FIELDS, "the loss of step 0"),
    ("parallel_4d", "samples"): (LONGER, "the loss of step 0"),
    ("parallel_4d", "init"): (["--pp", "2", *LONGER], "the loss of step 0"),
    # AdamW hides a factor of the gradients, but for its first steps.
    ("pipeline", "scale"): (
        ["--pp", "2", "--microbatches", "4", *LONGER],
        "the gradients of step 0 (tok_embeddings.weight)",
    ),
}
# These train nothing; test_teaching.py has their mistakes.
WITHOUT_STEPS = {"tensor_parallel", "collectives"}


def test_every_mistake_is_listed():
    """A mistake without a row would never be made here, and could show nothing."""
    mistakes = set()
    for file in Path(mmm.examples.__file__).parent.glob("[!_]*.py"):
        config = getattr(importlib.import_module(f"mmm.examples.{file.stem}"), "Config", None)
        if file.stem not in WITHOUT_STEPS:
            mistakes |= {(file.stem, mistake) for mistake in getattr(config, "BREAKS", ())}
    assert mistakes == set(SHOWS)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mistake"), SHOWS)
def test_a_mistake_shows(run_on_ranks, tmp_path, name, mistake):
    flags, where = SHOWS[name, mistake]
    flags = [*flags, "--dtype", "fp64", "--max_iters", "2", "--no-plots", "--outdir", tmp_path, "--break", mistake]
    done = run_program(run_on_ranks, 4, f"mmm.examples.{name}", *flags)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"--break {mistake}, on purpose" in done.stdout
    assert f"It shows first in {where}" in done.stdout
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["state"] == "finished"
    assert config["broken"]["name"] == mistake
    if name == "fsdp_tp":
        wrong = [n for n, difference in config["broken"]["steps"][0]["gradients"].items() if difference > 1e-9]
        assert wrong == [f"layers.{i}.ffn_norm.weight" for i in range(2)] or mistake == "averaged"
        np.testing.assert_allclose(
            config["broken"]["steps"][0]["loss"], config["broken"]["steps"][0]["expected"], 1e-12
        )


def test_launch_says_that_a_mistake_ended_on_purpose(monkeypatch):
    """Otherwise its last words are that rank 0 has failed. A program that is wrong by itself says no such thing."""
    reports = []
    monkeypatch.setattr(mistakes, "report", lambda *report: reports.append(report))
    for flags in (["--break", "norms"], []):
        monkeypatch.setattr("sys.argv", ["fsdp_tp", *flags])
        with pytest.raises(SystemExit, match="1"):
            mistakes.main(lambda config: False, fsdp_tp.Config, "")
    ((_, text, code),) = reports
    assert code == 1
    assert "--break norms" in text
    assert "on purpose" in text


def test_a_mistake_there_is_not():
    with pytest.raises(ValueError, match="--break"):
        fsdp_tp.train(configure(fsdp_tp.Config, break_="norm"))
    with pytest.raises(ValueError, match="--break"):
        ddp.train(configure(ddp.Config, break_="averaged"))
    with pytest.raises(ValueError, match="--break"):
        for_a_few_steps(configure(fsdp_tp.Config, break_="norms"))
