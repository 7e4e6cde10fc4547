"""``mmm.trainer.lm --model gpt``: nanoGPT's settings, the same losses on every mesh with dropout, weights on disk."""

import dataclasses
import json
import math
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import mmm.history
from mmm.errors import CheckpointError, ConfigError, LayoutError, UserError
from mmm.models.definition import check_sizes
from mmm.models.gpt import model as gpt
from mmm.models.gpt.model import GPTConfig
from mmm.run.command_line import configure, parse
from mmm.run.options import flags_of
from mmm.trainer import lm
from mmm.trainer.presets import GPT_TRAINING
from mmm.weights.hugging_face import export
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import main as cli
from support.pool import program_on

# Flags of a training that takes a second.
SMALL = {
    "model": "gpt",
    "n_layers": 2,
    "dim": 16,
    "n_heads": 4,
    "bias": True,
    "dropout": 0.2,
    "seq_length": 16,
    "global_batch_size": 4,
    "max_iters": 3,
    "dtype": "fp64",
    "device": "cpu",
    "eval_batches": 1,
    "plots": False,
}


def parsed(monkeypatch, line):
    monkeypatch.setattr("sys.argv", ["lm", *shlex.split(line)])
    return parse(lm.Config)


@pytest.mark.parametrize(
    ("preset", "run", "optimizer"),
    [
        ("shakespeare", (256, 64, 5000, 250, 200), (1e-3, 1e-4, (0.9, 0.99), 100)),
        ("shakespeare-cpu", (64, 12, 2000, 250, 20), (1e-3, 1e-4, (0.9, 0.99), 100)),
        ("gpt2", (1024, 480, 600_000, 1000, 5), (6e-4, 6e-5, (0.9, 0.95), 2000)),
    ],
)
def test_presets_are_nanogpts(monkeypatch, preset, run, optimizer):
    """config/train_shakespeare_char.py, its README for a CPU, config/train_gpt2.py."""
    config = parsed(monkeypatch, f"--model gpt --preset {preset}")
    evaluation, chosen = config.evaluation, config.optimizer
    assert run == (
        config.data.seq_length,
        config.run.global_batch_size,
        config.duration.max_iters,
        evaluation.eval_every,
        evaluation.eval_batches,
    )
    assert optimizer == (chosen.lr, chosen.min_lr, chosen.betas, chosen.warmup)
    assert (chosen.weight_decay, chosen.decayed, chosen.max_norm) == (0.1, "matrices", 1.0)
    assert evaluation.eval_train
    assert GPT_TRAINING.keys() == gpt.PRESETS.keys()
    for values in GPT_TRAINING.values():
        assert values.keys() <= flags_of(lm.Config()).keys()


def run(rank, outdir, flags):
    with program_on(rank) if rank is not None else nullcontext():
        lm.train(configure(lm.Config, **{**SMALL, **flags}, outdir=Path(outdir)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt") / "alone"
    run(None, folder, {"eval_train": True, "checkpoint_every": 3})
    return folder


def test_one_device(alone):
    """Where it starts, and that both estimates are of its last weights, without dropout."""
    record = mmm.history.load(alone)
    log = (alone / "log.txt").read_text()
    # Of 64 tokens of Python's own library, which each version of Python has anew.
    assert float(record.loss[0]) == pytest.approx(math.log(256), abs=0.2)
    assert 0 < abs(float(record.train_loss[-1]) - float(record.val_loss[-1])) < 0.5
    count = 2 * (12 * 16**2 + 13 * 16) + 2 * 16 + 256 * 16
    assert f"{count + 256:,} parameters, {count:,} without those of positions" in log


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="dp2"),
        pytest.param({"tpsize": 2}, id="tp2", marks=pytest.mark.long),
        pytest.param({"pp": 2, "microbatches": 2}, id="pp2", marks=pytest.mark.long),
    ],
)
def test_the_same_losses_with_dropout(run_on_ranks, alone, tmp_path, flags):
    run_on_ranks(run, 2, tmp_path / "run", {**flags, "eval_train": True})
    one = mmm.history.load(alone)
    other = mmm.history.load(tmp_path / "run")
    for name in ("loss", "val_loss", "train_loss"):
        assert other[name].values[-1] == pytest.approx(one[name].values[-1], rel=1e-9)
    assert other.loss.values == pytest.approx(one.loss.values, rel=1e-9)


def test_weights_on_disk(alone, tmp_path, capsys):
    """Its sizes, text from it, and a run that starts from it."""
    config = config_of(open_weights(alone))
    assert config == GPTConfig(dim=16, n_layers=2, n_heads=4, vocab_size=256, block_size=16, dropout=0.2, bias=True)
    sample = ["sample", str(alone), "--prompt", "def", "--device", "cpu", "--max-new-tokens"]
    # More than it has positions for: it goes on from half of them.
    assert cli.main([*sample, "20"]) == 0
    assert capsys.readouterr().out.startswith("def")
    assert cli.main([*sample, "2", "--block", "17"]) == 2
    assert "--block 17" in capsys.readouterr().err
    flags = {"init_from": alone, "model": None, "n_layers": None, "dropout": 0.0, "lr": 1e-9, "eval_every": 1}
    run(None, tmp_path / "on", {**flags, "max_iters": 1, "seed": 5, "eval_train": True})
    before = mmm.history.load(alone)
    after = mmm.history.load(tmp_path / "on")
    assert float(after.val_loss[0]) == pytest.approx(float(before.val_loss[-1]), rel=1e-3)


def test_a_run_can_be_exported_and_goes_on_from_there(alone, tmp_path):
    """With the exact GELU, as nanoGPT has it. A model without biases has no place in GPT-2's files."""
    weights = open_weights(alone)
    export(weights, tmp_path / "hf", None, 10**9, print)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    exported = [config[key] for key in ("n_positions", "activation_function", "resid_pdrop", "attn_pdrop")]
    assert exported == [16, "gelu", 0.2, 0.2]
    back = open_weights(tmp_path / "hf")
    assert config_of(back) == dataclasses.replace(config_of(weights), attention_dropout=0.2)
    assert all(torch.equal(back.read_full(name), weights.read_full(name)) for name in weights.entries)
    weights.sizes["bias"] = False
    with pytest.raises(CheckpointError, match="train one with --bias"):
        export(weights, tmp_path / "refused", None, 10**9, print)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"preset": "debug"}, "--preset"),
        ({"n_kv_heads": 2}, "--n_kv_heads 2 with --model"),
        ({"n_experts": 2}, "--n_experts 2 with --model"),
        ({"dropout": 1.0}, "dropout is 1.0: it must be at least 0, and below 1"),
        ({"n_heads": 5}, "n_heads 5"),
        ({"model": "llama"}, "--dropout 0.2"),
        ({"model": None, "dropout": None}, "--bias"),
        ({"min_lr": 0.1}, "--min_lr 0.1"),
        ({"min_lr": float("nan")}, "--min_lr nan"),
        ({"betas": (0.9, 1.0)}, "--betas 0.9 1.0"),
        ({"betas": (0.9, 0.9), "optimizer": "sgd"}, "--betas 0.9 0.9 with --optimizer"),
    ],
    ids=str,
)
def test_refused_before_anything_is_written(tmp_path, flags, message, no_process_group):
    with pytest.raises(UserError, match=re.escape(message)):
        run(None, tmp_path / "run", flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"weights": 0.1}, {"cp": 2}, "attention_dropout 0.1"),
        ({"seq": 33}, {}, "seq_length 33"),
        ({"seq": 30}, {"tp": 4}, "seq_length 30"),
        ({"vocab_size": 3}, {"tp": 4}, "vocab_size 3"),
    ],
)
def test_layouts_that_do_not_fit(changes, layout, message):
    from mmm.layout import Layout

    changes = dict(changes)
    seq = changes.pop("seq", 32)
    dropped = changes.pop("weights", 0.0)
    config = GPTConfig(**{"dim": 64, "n_heads": 8, "block_size": 32, "attention_dropout": dropped, **changes})
    with pytest.raises(LayoutError, match=re.escape(message)):
        check_sizes(config, Layout(**{"dp_shard": 1, **layout}), seq)
    check_sizes(dataclasses.replace(config, block_size=32, vocab_size=97), Layout(dp_shard=1, tp=4), 32)


def test_a_sample_drops_nothing(tmp_path, monkeypatch):
    training = []

    def sample_text(model, *_):
        training.extend(module.training for module in model.modules[0].modules())
        return "text", None

    monkeypatch.setattr("mmm.trainer.language.sample_text", sample_text)
    lm.train(configure(lm.Config, **SMALL, prompt="def", outdir=tmp_path))
    assert training
    assert not any(training)


@pytest.mark.parametrize(
    ("line", "flag"),
    [("--model llama --bias", "--bias with"), ("--model gpt --n_experts 4", "--n_experts 4 with")],
)
def test_a_size_that_the_model_has_not_is_named_as_it_was_typed(monkeypatch, line, flag):
    with pytest.raises(ConfigError, match=flag):
        lm.resolve(parsed(monkeypatch, f"{line} --device cpu"))
