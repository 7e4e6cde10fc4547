"""What a program does differently in a dry run."""

import sys
from dataclasses import dataclass

from mmm.examples import fsdp_tp
from mmm.run import options as groups
from mmm.run.command_line import configure, for_a_few_steps, parse
from mmm.runtime.contract import DRY_RUN_VARIABLE
from mmm.trainer import lm

RANK = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_few_steps_without_a_trace():
    options = for_a_few_steps(configure(lm.Config, parallel="fsdp", epochs=3, checkpoint_every=5, keep=2, plots=True))
    duration, checkpoint = options.duration, options.checkpoint
    assert (duration.max_iters, duration.epochs, options.run.plots) == (2, None, False)
    assert (checkpoint.checkpoint_every, checkpoint.keep) == (None, None)
    assert for_a_few_steps(configure(lm.Config, parallel="ddp")).duration.max_iters == 3
    assert for_a_few_steps(options) == options


def test_options_of_ones_own():
    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = 40
        run: groups.Run = groups.Run()

    assert for_a_few_steps(configure(Config, overwrite=True)) == Config()


def test_a_program_knows_by_its_rank(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a.program", "--max_iters", "9", "--device", "cpu"])
    assert parse(fsdp_tp.Config).duration.max_iters == 9
    for name, value in (RANK | {"MASTER_PORT": "1", DRY_RUN_VARIABLE: "1"}).items():
        monkeypatch.setenv(name, value)
    assert parse(fsdp_tp.Config).duration.max_iters == 3
