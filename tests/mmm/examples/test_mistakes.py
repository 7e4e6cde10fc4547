"""docs/mistakes.md has every mistake that an example can make, in the words of the example."""

import importlib
from pathlib import Path

import pytest

import mmm.examples

DOCS = Path(__file__).parents[3] / "docs" / "mistakes.md"
MODULES = [f"mmm.examples.{file.stem}" for file in sorted(Path(mmm.examples.__file__).parent.glob("[!_]*.py"))]
CONFIGS = {name: getattr(importlib.import_module(name), "Config", None) for name in MODULES}
BREAKS = {
    name.rpartition(".")[2]: breaks for name, config in CONFIGS.items() if (breaks := getattr(config, "BREAKS", {}))
}


@pytest.mark.parametrize("example", BREAKS)
def test_its_mistakes_are_in_the_table(example):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in DOCS.read_text().splitlines()]
    found = {row[1].strip("`"): row[2] for row in rows if row and row[0] == f"`{example}`"}
    assert found == BREAKS[example]


def test_examples_with_mistakes_are_found():
    assert {"tensor_parallel", "pipeline", "context_parallel", "moe", "parallel_4d"} <= set(BREAKS)
