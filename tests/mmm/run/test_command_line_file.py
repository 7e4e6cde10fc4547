"""--config FILE, and flags that a program leaves out."""

import json
import re
import sys
from pathlib import Path

import pytest

from mmm.errors import ConfigError
from mmm.examples import fsdp_tp, zero
from mmm.run import config_file
from mmm.run.command_line import configure, parse
from mmm.run.options import flags_of
from mmm.trainer import cnn, lm


def parsed(monkeypatch, program, *argv):
    monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, argv)])
    return parse(program.Config)


def record_of(module, options):
    """What a run's config.json has, with these flags."""
    return json.dumps({"module": module, "command": [], "versions": {}, "options": options}, default=str)


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
    file.write_text(record_of("lm", flags_of(config)))
    assert parsed(monkeypatch, lm, "--config", file) == config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "lr: 1e-2\nmax-iters: 4\ntp: 2\nplots: false\ntext: a.txt\nbetas: [0, 0.5]\n"),
        ("a.yml", "{lr: 0.01, max_iters: 4, tpsize: 2, plots: false, text: [a.txt], betas: [0.0, 0.5]}"),
        ("a.json", '{"lr": 0.01, "max_iters": 4, "tp": 2, "plots": false, "text": "a.txt", "betas": [0, 0.5]}'),
    ],
)
def test_each_format_sets_flags(monkeypatch, tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    flags = {"lr": 0.01, "max_iters": 4, "tpsize": 2, "plots": False, "text": (Path("a.txt"),)}
    config = parsed(monkeypatch, lm, "--config", file)
    assert config == configure(lm.Config, **flags, betas=(0.0, 0.5))
    assert config_file.facts == {"config_file": {"path": file, "flags": {**flags, "betas": (0.0, 0.5)}}}
    # The command line counts, also against a list.
    config = parsed(monkeypatch, lm, "--text", "b", "c", "--config", file, "--plots", "--lr=0.5")
    assert (config.data.text, config.run.plots, config.optimizer.lr) == ((Path("b"), Path("c")), True, 0.5)
    parsed(monkeypatch, lm)
    assert config_file.facts == {"config_file": None}


def test_a_preset_counts_less_than_the_file(monkeypatch, tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("max_iters: 7\nbatch_size: 3\n")
    config = parsed(monkeypatch, lm, "--preset", "shakespeare-cpu", "--config", file, "--warmup", 5)
    assert (config.duration.max_iters, config.optimizer.warmup, config.optimizer.weight_decay) == (7, 5, 0.1)
    assert (config.run.batch_size, config.run.global_batch_size) == (3, None)


@pytest.mark.parametrize("argv", [None, "None"])
def test_what_a_run_took_away_from_its_preset_stays_away(monkeypatch, tmp_path, argv):
    """The preset's weight decay is 0.1 of matrices; the run had PyTorch's default, which is on record as null."""
    (tmp_path / "config.json").write_text(
        record_of("lm", {"preset": "shakespeare-cpu", "weight_decay": argv, "decayed": argv})
    )
    optimizer = parsed(monkeypatch, lm, "--config", tmp_path).optimizer
    assert (optimizer.weight_decay, optimizer.decayed) == (None, None)
    optimizer = parsed(monkeypatch, lm, "--config", tmp_path, "--decayed", "all").optimizer
    assert (optimizer.weight_decay, optimizer.decayed) == (None, "all")


def test_homes_and_variables_in_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "flags.yaml"
    file.write_text("outdir: $SCRATCH/runs\ntext: [~/a.txt, '${SCRATCH}/b.txt']\nname: $SCRATCH\n")
    from_file = parsed(monkeypatch, lm, "--config", file)
    text = ["--text", "~/a.txt", "--text", "${SCRATCH}/b.txt"]
    assert parsed(monkeypatch, lm, "--outdir", "$SCRATCH/runs", *text, "--name=$SCRATCH") == from_file
    assert from_file.run.outdir == Path("/scratch/me/runs")
    assert from_file.data.text == (Path("/home/me/a.txt"), Path("/scratch/me/b.txt"))
    # A name is no path.
    assert from_file.run.name == "$SCRATCH"
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert parsed(monkeypatch, lm, "--config", "$SCRATCH/flags.yaml").run.outdir == tmp_path / "runs"


def test_a_record_does_not_say_where_to_write(monkeypatch, tmp_path):
    flags = {"lr": 0.5, "outdir": "runs/a", "name": "a", "overwrite": True, "resume": "auto"}
    (tmp_path / "config.json").write_text(record_of("lm", flags))
    assert parsed(monkeypatch, lm, "--config", tmp_path) == configure(lm.Config, lr=0.5)


def test_examples_take_a_file_and_show_its_values(monkeypatch, tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    file.write_text("break: no-allreduce\nlr: 0.25\n")
    with pytest.raises(ConfigError, match="--break no-allreduce"):
        parsed(monkeypatch, fsdp_tp, "--config", file)
    file.write_text("lr: 0.25\n")
    with pytest.raises(SystemExit):
        parsed(monkeypatch, fsdp_tp, "--config", file, "--help")
    out = capsys.readouterr().out
    assert "--config FILE" in out
    assert "(default: 0.25)" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not YAML"),
        ("a: [", "not YAML"),
        ("lr: !!python/name:os.system", "it takes FLOAT"),
        ("- lr", "no flags"),
        ("", "no flags"),
        ("lrr: 1", "lrr: this program has no such flag. Did you mean lr?"),
        ("config: base.yaml", "no such flag"),
        ("module: lm\noptions: {lr: 1}", "options"),
        ("gamma: 1", "no such flag"),
        ("lr: 1\nlr: 2", "'lr' is there twice"),
        ("tp: 1\ntpsize: 2", "twice"),
        ("plots: true\nno_plots: []", "no_plots"),
        ("lr: fast", "lr 'fast': it takes FLOAT"),
        ("lr: true", "it takes FLOAT"),
        ("lr: null", "it takes FLOAT"),
        ("lr: [1, 2]", "it takes FLOAT"),
        ("lr: []", "it takes FLOAT"),
        ("max_iters: 1.5", "'1.5': it takes INT"),
        ("max_iters: 1:40", "'1:40': it takes INT"),
        ("max_iters: true", "it takes INT"),
        ("plots: 1", "'1': it takes {true,false}"),
        ("plots: []", "it takes {true,false}"),
        ("no_plots: true", "it takes {true,false}"),
        ("outdir: ''", "outdir '': it takes PATH"),
        ("text: [a, '']", "text 'a ': it takes [PATH ...]"),
        ("outdir: ~", "it takes PATH"),
        ("outdir:", "it takes PATH"),
        ("parallel: dpp", "'dpp': it takes {ddp"),
        ("dtype: true", "{auto,"),
        ("betas: [1]", "FLOAT FLOAT"),
        ("betas: [1, x]", "FLOAT FLOAT"),
        ("betas: [1, [2]]", "['2']"),
        ("lr: {a: 1}", "{'a': '1'}"),
        ("lr: &a [*a]", "recursive"),
        ("max_iters: 1e3", "it takes INT"),
        ("lr: " + "[" * 5000, "recursion"),
        ("seed: " + "1" * 5000, "it takes INT"),
    ],
)
def test_a_file_that_is_refused(monkeypatch, tmp_path, text, message):
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parsed(monkeypatch, lm, "--config", file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--config", "without a value: it takes FILE"),
        ("--config --lr 1", "without a value: it takes FILE"),
        ("--config=", "it takes FILE"),
        ("--config a.yaml --config=b.yaml", "twice"),
        ("--config missing.yaml", "No such file"),
        ("--config bytes.yaml", "utf-8"),
        ("--config twice.json", "'lr' is there twice"),
        ("--config vit.json", "patch_size: this program has no such flag"),
        ("--config .", "No such file"),
        ("--config date.toml", "no flags"),
        ("--lr 1 --lr 2", "--lr: this flag is there twice"),
        ("--plots --no-plots", "--no-plots: this flag is there twice"),
        ("--betas 0 0.5 --betas 0 0.9", "--betas: this flag is there twice"),
        ("--outdir $NO_SUCH_FOLDER/runs", "the variable $NO_SUCH_FOLDER is not set"),
        ("--outdir ~nobody_of_that_name/runs", "no such user"),
        ("more --lr 1", "more"),
        ("-lr 1", "-lr"),
        ("--lrr 1", "Did you mean --lr?"),
    ],
)
def test_a_use_that_is_refused(monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"lr: \xff")
    (tmp_path / "twice.json").write_text('{"lr": 1, "lr": 2}')
    (tmp_path / "vit.json").write_text(record_of("vit", {"patch_size": 8}))
    (tmp_path / "date.toml").write_text("name = 2026-01-01")
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(monkeypatch, lm, *argv.split())


def test_a_flag_without_effect_is_refused_and_not_listed(monkeypatch, capsys):
    with pytest.raises(ConfigError, match="gamma"):
        parsed(monkeypatch, lm, "--gamma", "0.5")
    with pytest.raises(SystemExit):
        parsed(monkeypatch, lm, "--help")
    assert "--gamma" not in capsys.readouterr().out
    assert "gamma" not in flags_of(lm.Config())
    with pytest.raises(TypeError, match="eval_every"):
        configure(cnn.Config, eval_every=3)


def test_choices_of_a_program(monkeypatch):
    with pytest.raises(ConfigError, match=r"'sgd': it takes \{adamw\}"):
        parsed(monkeypatch, zero, "--optimizer", "sgd")
    assert configure(lm.Config, dtype="fp16").run.dtype == "fp16"
