"""``--help`` of the examples: its own flags first, no more than a reader takes in, and 80 columns wide.
docs/mistakes.md has every mistake that an example can make, in the words of the example."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import mmm.examples
from mmm.examples import fsdp_tp, hsdp, moe
from mmm.examples._support import parse
from mmm.models.llama.model import PRESETS
from mmm.models.vit.definition import MODEL as VIT
from mmm.trainer import lm, vit

# --config, which every program has, is one of them.
MOST_FLAGS = 34


def help_of(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program.__name__, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        parse(program.Config, program.__doc__)
    assert left.value.code == 0
    return capsys.readouterr().out


def flag_lines(text):
    """The first line of each flag."""
    (_, panels) = re.split(r"^\W*options\W*$", text, maxsplit=1, flags=re.MULTILINE)
    return [line.strip() for line in panels.splitlines() if re.match(r"[ │]{0,3}--(?!no_)[a-z]", line)]


def sections(text):
    return re.findall(r"^\W*(\w+) options", text, re.MULTILINE)


def test_an_example_has_its_own_flags_first_and_few(monkeypatch, capsys):
    text = help_of(fsdp_tp, monkeypatch, capsys)
    flags = flag_lines(text)
    assert re.search("--tp|--tpsize", flags[0])
    assert flags[1].startswith("--break")
    assert len(flags) <= MOST_FLAGS
    assert sections(text) == ["model", "data", "optimizer", "duration", "run", "evaluation"]
    assert "(default: 0.003)" in text


@pytest.mark.parametrize(("program", "first"), [(moe, "model"), (hsdp, "model")])
def test_the_technique_comes_first(monkeypatch, capsys, program, first):
    assert sections(help_of(program, monkeypatch, capsys))[0] == first


def test_a_trainer_shows_its_groups(monkeypatch, capsys):
    text = help_of(lm, monkeypatch, capsys)
    groups = ["model", "adapter", "data", "mesh", "optimizer", "evaluation", "checkpoint", "duration", "run"]
    assert sections(text) == groups
    assert len(flag_lines(text)) <= 64


DOCS = Path(__file__).parents[3] / "docs" / "mistakes.md"
MODULES = [f"mmm.examples.{file.stem}" for file in sorted(Path(mmm.examples.__file__).parent.glob("[!_]*.py"))]
CONFIGS = {name: getattr(importlib.import_module(name), "Config", None) for name in MODULES}
BREAKS = {
    name.rpartition(".")[2]: breaks for name, config in CONFIGS.items() if (breaks := getattr(config, "BREAKS", {}))
}


@pytest.mark.parametrize("example", BREAKS)
def test_its_mistakes_are_in_the_table(example):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCS.read_text().splitlines()]
    described = {row[1].strip("`"): row[2] for row in rows if row and row[0] == f"`{example}`"}
    assert described == BREAKS[example]


@pytest.mark.parametrize(("program", "presets"), [(fsdp_tp, PRESETS), (vit, VIT.presets)])
def test_help_lists_every_preset(monkeypatch, capsys, program, presets):
    text = "".join(help_of(program, monkeypatch, capsys).split())
    assert ",".join(presets) in text
