"""What a program does differently in a dry run."""

import sys
from dataclasses import dataclass

from mmm.examples import fsdp_tp
from mmm.runtime.contract import DRY_RUN_VARIABLE
from mmm.trainer import lm
from mmm.trainer.config.command_line import configure, for_a_few_steps, parse
from mmm.trainer.config.run import BatchOptions

RANK = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


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
