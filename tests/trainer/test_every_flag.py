"""Every option that a program's code reads can be given, or is meant to be fixed; and every flag is read."""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mmm.examples import moe
from mmm.examples.__main__ import runnable_modules
from support.flags import flags, reads

SAME = {"mmm.examples.vit": "mmm.trainer.vit"}  # one program under two names
PROGRAMS = [name for name in runnable_modules() if name not in SAME]
DEFAULTS = {"default_max_iters", "default_batch_size", "break_", "BREAKS", "parallel", "RUNS_ON_MPS", "TIES"}
DEFAULTS |= {"checkpoint_every", "replica", "resume", "tracker"}  # of programs without the shared loop
DEFAULTS |= {"compile"}  # of programs other than trainers
NOTHING_TO_DRAW = {"plots"}
# What shared code reads, and the program has no flag for: by design.
FIXED = {
    "mmm.examples.collectives": {"seed", "dtype", *NOTHING_TO_DRAW},  # counts, in float32
    "mmm.examples.traffic": NOTHING_TO_DRAW,
    "mmm.trainer.cnn": {"log_every", "ep", "cp", "cp_style", "activation_checkpointing"},
    "mmm.trainer.vit": {"ep", "cp", "cp_style"},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_read_can_be_given_and_what_can_be_given_is_read(name):
    program = importlib.import_module(name)
    given, read = flags(program.Config), reads(program)
    assert len(read) > 5
    assert read - given - DEFAULTS == FIXED.get(name, set()), "read, and no flag"
    assert given - read == set(), "flags without effect"


def test_a_flag_without_effect_is_found():
    @dataclass(frozen=True, kw_only=True)
    class Config(moe.Config):
        wave: int = 1

        def check(self) -> None:
            assert self.wave == 1

    assert flags(Config) - reads(SimpleNamespace(Config=Config, train=moe.train)) == {"wave"}
