"""The site's reference has every command, flag, column and public name."""

import html
import importlib
import re

import pytest

from mmm.history.record.dataset import legend
from mmm.run.options import flags_of
from mmm_lab.cli.main import SUBCOMMANDS
from support.pages import SITE

pytestmark = pytest.mark.docs


def page(name):
    text = (SITE / "reference" / f"{name}.html").read_text(encoding="utf-8")
    assert "made from the code" not in text, "a part that is not filled in"
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_commands():
    text = page("commands")
    for name in [*(f"mmm {subcommand}" for subcommand in SUBCOMMANDS), "launch"]:
        assert re.search(rf"usage: {name}\b", text), name


@pytest.mark.parametrize("program", ["lm", "vit", "cnn"])
def test_flags(program):
    text = page("flags")
    config = importlib.import_module(f"mmm.trainer.{program}").Config()
    # From its heading on, which has a link to itself.
    own = text[text.rindex(f"mmm.trainer.{program}¶") :]
    flags = flags_of(config)
    assert len(flags) > 30
    for flag in flags:
        assert re.search(rf"--{flag}\b", own), flag


def test_columns():
    text = page("record")
    for line in legend(["loss", "dt", "val_bpb", "mfu", "tps"]).splitlines()[1:]:
        metavar = line.split(maxsplit=1)[1].partition(",")[0]
        assert metavar in text, metavar


def test_names():
    text = page("api")
    for package in ("parallel", "history", "checkpoint"):
        for name in dir(importlib.import_module(f"mmm.{package}")):
            assert re.search(rf"\b{name}\b", text), name
    assert "Args" in text or "Parameters" in text
