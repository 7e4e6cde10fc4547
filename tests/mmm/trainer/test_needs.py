"""A flag that has no effect beside the others is refused, with the reason, also where its default was given. What a run
says at its start: of its model, its ranks on the mesh and on hosts, its optimizer. What a program does differently in a
dry run. FLOPs of a step against the formula, and whose peak they are divided by. A run's record has what was predicted
for it and what was measured, and nothing that goes wrong there ends a run."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.examples import fsdp_tp, parallel_4d
from mmm.history import load
from mmm.layout import Layout
from mmm.models.definition import find
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.vit.model import ViT, ViTConfig
from mmm.nn.lora import add_lora
from mmm.optim.adamw import make_optimizer
from mmm.parallel import meta_parameters
from mmm.run import options as groups
from mmm.run.command_line import configure, for_a_few_steps, parse
from mmm.run.hooks.utilization import peak_flops, step_flops
from mmm.run.tables import mesh_table
from mmm.runtime.ranks import DRY_RUN_VARIABLE
from mmm.trainer import cnn, lm, vit
from mmm.trainer.job import model_summary
from mmm.trainer.rate import optimizer_text
from mmm_lab.planner.measured import measured_path
from mmm_launch.machines.find import BUILT_IN

STAGES = "without --pp: there is one stage, the model"
EXPERTS = "without --n_experts: the experts of a preset"


@pytest.mark.parametrize(
    ("program", "flags", "message"),
    [
        (lm, {"schedule": "1F1B"}, f"--schedule 1F1B {STAGES}"),
        (lm, {"stages_per_rank": 1}, f"--stages_per_rank 1 {STAGES}"),
        (lm, {"cp_style": "ring"}, "--cp_style"),
        (lm, {"cp": 1, "cp_style": "usp"}, "--cp_style"),
        (lm, {"ulysses": 2}, "--ulysses 2"),
        (lm, {"top_k": 2}, f"--top_k 2 {EXPERTS}"),
        (lm, {"expert_dim": 64}, f"--expert_dim 64 {EXPERTS}"),
        (lm, {"balance_rate": 0.01}, f"--balance_rate 0.01 {EXPERTS}"),
        (vit, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (cnn, {"schedule": "GPipe", "dataset": "digits"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"schedule": "GPipe"}, f"--schedule GPipe {STAGES}"),
        (parallel_4d, {"microbatches": 2}, f"--microbatches 2 {STAGES}"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(monkeypatch, tmp_path, program, flags, message, no_process_group):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        program.train(configure(program.Config, **flags))
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_multiply_adds_are_those_of_all_tokens():
    sizes = ViTConfig(image_size=32, patch_size=8, classes=10, dim=64, n_layers=2, n_heads=4)
    with torch.device("meta"):
        model = ViT(sizes)
        images = torch.zeros(3, sizes.channels, 32, 32)
    tokens = 3 * 16
    dim = 64
    # Numbers of a patch.
    patch = 8 * 8 * sizes.channels
    # projections, MLP, attention
    projections = 4 * dim * dim
    mlp = 2 * 4 * dim * dim
    attention = 2 * tokens * 16 * dim
    layer = tokens * (projections + mlp) + attention
    expected = tokens * patch * dim + 2 * layer + 3 * dim * sizes.classes
    assert f"Total mult-adds: {expected:,}, of forward's matrix products" in model_summary(model, images)


def test_ranks_on_the_mesh():
    table = mesh_table(Layout(pp=2, dp_shard=2, tp=3)).splitlines()
    assert table[0] == "ranks on the mesh, along tp"
    assert table[2] == "pp 0  dp_shard 1    3  4  5"
    assert table[4] == "pp 1  dp_shard 1    9 10 11"
    # A mesh of one axis needs no table, and one of 128 ranks has no room.
    assert mesh_table(Layout(dp_shard=8)) == ""
    assert len(mesh_table(Layout(dp_shard=8, tp=8)).splitlines()) == 9
    assert mesh_table(Layout(dp_shard=16, tp=8)) == ""


def test_an_optimizer_in_words():
    model = nn.Linear(4, 2)
    text = optimizer_text(make_optimizer("adamw", model.parameters(), 0.003, 0.1, "matrices"))
    assert text == "AdamW, lr 0.003, betas (0.9, 0.999), weight decay 0.1 of 8 of 10 parameters"
    assert optimizer_text(make_optimizer("sgd", model.parameters(), 0.5)) == "SGD, lr 0.5"


# The environment of one of eight ranks.
RANK = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_few_steps_without_a_trace():
    options = for_a_few_steps(configure(lm.Config, parallel="fsdp", epochs=3, checkpoint_every=5, keep=2, plots=True))
    duration, checkpoint = options.duration, options.checkpoint
    assert (duration.max_iters, duration.epochs, options.run.plots) == (2, None, False)
    assert (checkpoint.checkpoint_every, checkpoint.keep) == (None, None)
    assert for_a_few_steps(configure(lm.Config, parallel="ddp")).duration.max_iters == 3
    assert for_a_few_steps(options) == options


def test_options_of_ones_own():
    """A script's own --epochs was None in a dry run, and the script of a tutorial ended with a TypeError."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = 40
        epochs: int = 4
        run: groups.RunFlags = groups.RunFlags()

    assert for_a_few_steps(configure(Config, overwrite=True)) == Config()


def test_a_program_knows_by_its_rank(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a.program", "--max_iters", "9", "--device", "cpu"])
    assert parse(fsdp_tp.Config).duration.max_iters == 9
    for name, value in (RANK | {"MASTER_PORT": "1", DRY_RUN_VARIABLE: "1"}).items():
        monkeypatch.setenv(name, value)
    assert parse(fsdp_tp.Config).duration.max_iters == 3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_flops_are_those_of_the_formula(samples, tied):
    """6 a weight and token, and 12 · layers · dim · seq² for scores and their product with the values."""
    config = TransformerConfig(
        dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, tie_word_embeddings=tied
    )
    with meta_parameters():
        model = Transformer(config)
    seq = 16
    attention = 2 * 32 * 32 + 2 * 32 * 16
    feed_forward = 3 * 32 * 48
    weights = 3 * (attention + feed_forward) + 32 * 64
    inputs = torch.zeros(samples, seq, dtype=torch.int64, device="meta")
    assert step_flops(model, inputs) == 6 * weights * seq + 12 * 3 * 32 * seq**2
    # With LoRA, 4 a frozen weight and token: its own gradient is left out; and 6 for each element of A and B.
    add_lora(model, ("layers.*.attention.wq", "layers.*.feed_forward.w1"), rank=4, scale=1.0)
    # A and B of rank 4, of two matrices in each of three layers.
    small = 3 * 4 * (32 + 32 + 32 + 48)
    scores = 12 * 3 * 32 * seq**2
    expected = 4 * weights * seq + 6 * small * seq + scores
    assert step_flops(model, inputs) == expected


def test_a_plan_without_stages(tmp_path, monkeypatch):
    """Only a pipeline needs them. A hook of rank 0 counted FLOPs by them, and raised while the others waited."""
    model = find("llama")
    plan = replace(model.plan(None), stages=())
    monkeypatch.setattr("mmm.models.llama.definition.MODEL", replace(model, plan=lambda sizes: plan))
    find.cache_clear()
    flags = {"preset": "debug", "seq_length": 16, "batch_size": 2, "max_iters": 2, "plots": False, "device": "cpu"}
    try:
        lm.train(configure(lm.Config, **flags, outdir=tmp_path, eval_batches=1))
    finally:
        find.cache_clear()
    assert (load(tmp_path).mfu > 0).all()


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 19.5e12),
    ],
)
def test_peaks_of_known_devices(monkeypatch, name, dtype, peak):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    flops, source = peak_flops(torch.device("cuda", 0), dtype)
    assert flops == peak
    assert source.startswith(f"{name}: table, ")


# A command whose record has a prediction.
LM = [sys.executable, "-m", "mmm.trainer.lm", "--device", "cpu", "--preset", "debug", "--dataset", "random"]
LM += ["--seq_length", "32", "--batch_size", "2", "--max_iters", "3", "--no-plots", "--eval_batches", "1"]


def run(tmp_path, monkeypatch, machine=None):
    """The record of a run, and its last line. machine: what is in the machine file of this host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if machine is not None:
        measured_path().parent.mkdir(parents=True)
        measured_path().write_text(machine)
    done = subprocess.run([*LM, "--outdir", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    (line,) = [line for line in lines if "memory of rank 0: " in line or "no prediction: " in line]
    return json.loads((tmp_path / "run" / "config.json").read_text()), line


@pytest.mark.long
@pytest.mark.parametrize("known", [False, True])
def test_predicted_and_measured(tmp_path, monkeypatch, known):
    laptop = (BUILT_IN / "laptop.json").read_text()
    config, line = run(tmp_path, monkeypatch, laptop if known else None)
    predicted = config["predicted"]
    measured = config["measured"]
    assert predicted["peak_bytes"] == sum(predicted["memory_bytes"].values()) > 0
    assert measured["step_seconds"] > 0
    assert measured["peak_bytes"] > 0
    assert f"predicted {predicted['peak_bytes'] / 2**20:,.2f} MiB; step: " in line
    if known:
        assert predicted["machine"] == "Laptop"
        assert f"step: predicted {predicted['step_seconds']:.4g} s (Laptop), measured" in line
    else:
        assert predicted["step_seconds"] is None
        assert "mmm machine --measure" in line


@pytest.mark.long
def test_a_prediction_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    config, line = run(tmp_path, monkeypatch, "{no machine")
    assert config["predicted"]["failed"].startswith("MachineError: machine file ")
    assert "no prediction: MachineError" in line
    assert config["measured"]["step_seconds"] > 0
