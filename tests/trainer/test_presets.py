"""What a preset sets besides sizes, and what a command line may say against it."""

import shlex
from dataclasses import fields

import pytest

from mmm.errors import ConfigError
from mmm.examples import fsdp_tp
from mmm.models.transformer import PRESETS
from mmm.trainer import lm
from mmm.trainer.options import parse
from mmm.trainer.presets import TRAINING, preset_defaults


def parsed(monkeypatch, line):
    monkeypatch.setattr("sys.argv", ["lm", *shlex.split(line)])
    return parse(lm.Config)


@pytest.mark.parametrize("line", ["--preset shakespeare-cpu", "--preset=shakespeare-cpu"])
def test_flags_beside_a_preset(monkeypatch, line):
    config = parsed(monkeypatch, line)
    assert (config.preset, config.seq_length, config.global_batch_size) == ("shakespeare-cpu", 64, 12)
    assert (config.dataset, config.weight_decay, config.decayed) == ("shakespeare", 0.1, "matrices")
    config = parsed(monkeypatch, f"{line} --seq-length 32 --batch_size 4 --text a.txt --decayed all")
    assert (config.seq_length, config.batch_size, config.global_batch_size) == (32, 4, None)
    assert (config.dataset, config.decayed, config.weight_decay) == ("text", "all", 0.1)
    assert parsed(monkeypatch, f"{line} --optimizer sgd").weight_decay is None
    assert parsed(monkeypatch, f"{line} --prompt sgd").weight_decay == 0.1
    assert parsed(monkeypatch, f"{line} --epochs 30").steps(1300) == 39_000
    config = parsed(monkeypatch, f"{line} --lr_schedule cosine")
    assert (config.lr_schedule, config.decay) == ("cosine", None)


def test_other_presets_change_nothing(monkeypatch):
    assert parsed(monkeypatch, "") == lm.Config()
    assert parsed(monkeypatch, "--preset llama-8b") == lm.Config(preset="llama-8b")
    assert preset_defaults(["--text", "shakespeare-cpu"]) == {}


def test_every_value_is_of_a_flag():
    assert TRAINING.keys() <= PRESETS.keys()
    names = {field.name for field in fields(lm.Config)}
    for values in TRAINING.values():
        assert values.keys() <= names


def test_an_example_takes_no_tied_preset():
    with pytest.raises(ConfigError, match="--preset gpt2 has one weight for embedding and output"):
        fsdp_tp.Config(preset="gpt2").model_config()
    assert fsdp_tp.Config(preset="shakespeare").model_config().n_layers == 12
