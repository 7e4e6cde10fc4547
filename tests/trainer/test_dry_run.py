"""What a program does differently in a dry run, and what its flag ``--dry_run`` stands for."""

import os
import sys
from dataclasses import dataclass

import pytest

from mmm.contract import DRY_RUN_VARIABLE
from mmm.examples import fsdp_tp
from mmm.trainer import lm
from mmm.trainer.config import command_line
from mmm.trainer.config.command_line import configure, follow_alias, for_a_few_steps, parse
from mmm.trainer.config.run import BatchOptions

RANK = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def executed(monkeypatch):
    """The lines that were to replace this process."""
    lines = []
    monkeypatch.setattr(os, "execv", lambda _, line: lines.append(line[3:]))
    monkeypatch.setattr(command_line, "command_line", lambda: ["python3", "-m", "a.program", *sys.argv[1:]])
    return lines


def test_a_few_steps_without_a_trace():
    options = for_a_few_steps(configure(lm.Config, parallel="fsdp", epochs=3, checkpoint_every=5, keep=2, plots=True))
    run, checkpoint = options.run, options.checkpoint
    assert (run.max_iters, run.epochs, run.plots) == (2, None, False)
    assert (checkpoint.checkpoint_every, checkpoint.keep) == (None, None)
    assert for_a_few_steps(configure(lm.Config, parallel="ddp")).run.max_iters == 3
    assert for_a_few_steps(options) == options


def test_options_of_ones_own():
    @dataclass(frozen=True, kw_only=True)
    class Config(BatchOptions):
        steps: int = 40

    assert for_a_few_steps(Config(overwrite=True)) == Config(steps=40)


def test_a_program_knows_by_its_rank(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a.program", "--max_iters", "9", "--device", "cpu"])
    assert parse(fsdp_tp.Config).run.max_iters == 9
    for name, value in (RANK | {"MASTER_PORT": "1", DRY_RUN_VARIABLE: "1"}).items():
        monkeypatch.setenv(name, value)
    assert parse(fsdp_tp.Config).run.max_iters == 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--dry_run 8", "dry-run 8 -- python3 -m a.program"),
        ("--tp 2 --dry-run=8 --lr 1", "dry-run 8 -- python3 -m a.program --tp 2 --lr 1"),
        (
            "--dry_run 8 --dry_run_memory 64GiB --tp 2 --dry-run-json=a.json --dry_run_rank 3",
            "dry-run 8 --memory 64GiB --json a.json --rank 3 -- python3 -m a.program --tp 2",
        ),
        ("--tp 2 --dry_run", "dry-run -- python3 -m a.program --tp 2"),
    ],
)
def test_what_the_alias_stands_for(monkeypatch, executed, capsys, words, line):
    monkeypatch.setattr(sys, "argv", ["a.program", *words.split()])
    follow_alias()
    assert [" ".join(each) for each in executed] == [line]
    assert capsys.readouterr().err == f"--dry_run is an alias of: mmm {line}\n"


def test_no_alias(monkeypatch, executed):
    """Where there is none on the line; of other ranks than 0; in a dry run; where a program has a flag of that name."""
    monkeypatch.setattr(sys, "argv", ["a.program", "--tp", "2"])
    follow_alias()

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchOptions):
        dry_run: int = 0

    monkeypatch.setattr(sys, "argv", ["a.program", "--dry_run", "8"])
    assert parse(Config).dry_run == 8
    for name, value in (RANK | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        follow_alias()
    assert left.value.code == 0
    monkeypatch.setenv(DRY_RUN_VARIABLE, "1")
    follow_alias()
    assert not executed
