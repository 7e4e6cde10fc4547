"""--config FILE, and flags that a program leaves out."""

import json
import sys

import pytest

from mmm.errors import ConfigError
from mmm.examples import zero
from mmm.run.command_line import configure, parse
from mmm.run.options import flags_of
from mmm.trainer import cnn, lm


def parsed(monkeypatch, program, *words):
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, words)])
    return parse(program.Config)


def test_a_file_sets_flags_and_the_command_line_counts(monkeypatch, tmp_path):
    file = tmp_path / "flags.json"
    file.write_text(json.dumps({"betas": [0.9, 0.95], "pack": True, "plots": False, "lr": 0.1, "keep": None}))
    config = parsed(monkeypatch, lm, "--config", file, "--lr", "0.2")
    assert config == configure(lm.Config, betas=(0.9, 0.95), pack=True, plots=False, lr=0.2)


def test_a_file_may_name_a_preset(monkeypatch, tmp_path):
    file = tmp_path / "flags.json"
    file.write_text(json.dumps({"preset": "shakespeare-cpu", "warmup": 5}))
    optimizer = parsed(monkeypatch, lm, f"--config={file}").optimizer
    assert (optimizer.warmup, optimizer.weight_decay, optimizer.lr_schedule) == (5, 0.1, "wsd")


def test_the_config_of_a_run_makes_it_again(monkeypatch, tmp_path):
    config = parsed(monkeypatch, lm, "--preset", "shakespeare-cpu", "--batch_size", 4, "--tp", 1, "--seed", 7)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"name": "lm", "options": flags_of(config)}, default=str))
    assert parsed(monkeypatch, lm, "--config", file) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "no flags"),
        ('{"learning_rate": 1}', "learning_rate"),
        ('{"gamma": 1}', "gamma"),
    ],
)
def test_a_file_that_is_refused(monkeypatch, tmp_path, text, words):
    file = tmp_path / "flags.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parsed(monkeypatch, lm, "--config", file)


def test_a_flag_without_effect_is_refused_and_not_listed(monkeypatch, capsys):
    for words in (["--gamma", "0.5"], ["--help"]):
        with pytest.raises(SystemExit) as left:
            parsed(monkeypatch, lm, *words)
        assert left.value.code == (0 if words == ["--help"] else 2)
    assert "--gamma" not in capsys.readouterr().out
    assert "gamma" not in flags_of(lm.Config())
    with pytest.raises(TypeError, match="eval_every"):
        configure(cnn.Config, eval_every=3)


def test_choices_of_a_program(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, zero, "--optimizer", "sgd")
    assert "adamw" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--optimizer sgd"):
        configure(zero.Config, optimizer="sgd")
    assert configure(lm.Config, dtype="fp16").run.dtype == "fp16"
