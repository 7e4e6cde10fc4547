"""Every flag of a program is read by its code: none is without effect."""

import ast
import importlib

import pytest

from mmm.examples.__main__ import runnable_modules
from mmm.trainer.config.run import flags_of
from support.flags import attributes, reads

PROGRAMS = [name for name in runnable_modules() if name != "mmm.examples.vit"]  # which is mmm.trainer.vit


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_can_be_given_is_read(name):
    flags = flags_of(importlib.import_module(name).Config()).keys()
    assert len(flags) > 5
    assert flags - reads(name) == set(), "flags without effect"


def test_a_flag_without_effect_is_found():
    text = "def train(config):\n    use(config.lr)\ndef check(config):\n    assert config.wave == 1\n"
    assert attributes(ast.parse(text)) == {"lr"}
