"""What a target imports is read from its source; none of it runs."""

import sys

import pytest

from mmm_launch.program.preloads import Preload, preloads
from mmm_launch.program.target import Target

BOMB = "raise SystemExit('this was run')\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield lambda name, text: (
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True),
        (tmp_path / name).write_text(text),
    )
    assert not {m for m in set(sys.modules) - before if m.startswith(("local", "pkg"))}, "the user's were imported"


def names(target):
    return [p.module for p in preloads(target)]


def test_installed_packages_in_the_order_of_the_source(project):
    project("local.py", "import numpy as np, json\nfrom torch.distributed import fsdp, tensor\nimport h5py\n" + BOMB)
    expected = [Preload("numpy"), Preload("json"), Preload("torch.distributed", ("fsdp", "tensor")), Preload("h5py")]
    assert preloads(Target("script", "local.py")) == expected
    assert preloads(Target("module", "local")) == expected
    assert preloads(Target("code", "import local")) == expected


def test_the_users_own_modules_are_followed_and_not_listed(project):
    project("pkg/__init__.py", "import h5py\n" + BOMB)
    project("pkg/train.py", "from . import model\nfrom .deep.block import Block\nimport local_tool\n" + BOMB)
    project("pkg/model.py", "import numpy\nfrom pkg import train\n" + BOMB)  # a circle
    project("pkg/deep/__init__.py", "")
    project("pkg/deep/block.py", "from ..model import x\nimport matplotlib.pyplot\n" + BOMB)
    project("local_tool.py", "import rich.table\n" + BOMB)
    assert names(Target("module", "pkg.train")) == ["h5py", "numpy", "matplotlib.pyplot", "rich.table"]


def test_only_what_is_imported_for_certain(project):
    project(
        "local.py",
        """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import h5py
try:
    import numpy
except ImportError:
    import xarray
if some_flag:
    import pandas
def main():
    import matplotlib
with quiet():
    import rich
if __name__ == "__main__":
    import tyro
""",
    )
    assert names(Target("script", "local.py")) == ["typing", "numpy", "rich", "tyro"]


def test_missing_modules_and_broken_sources_are_left_to_the_target(project):
    project("local.py", "import local_broken, local_missing.x\nimport numpy\n")
    project("local_broken.py", "def (:\n")
    assert names(Target("script", "local.py")) == ["numpy"]
    assert names(Target("script", "local_broken.py")) == []
    assert names(Target("module", "local_absent")) == []


def test_names_that_a_package_of_ours_imports_later_are_asked_for(project):
    project("tool.py", "def start_run(): pass\n")
    text = "from mmm.examples import _support as example\nimport tool\nprint(example.start_run, tool.start_run)\n"
    project("local.py", text + "def train():\n    return example.Record()\n" + BOMB)
    assert preloads(Target("script", "local.py")) == [
        Preload("mmm.examples", ("_support",)),
        Preload("mmm.examples._support", ("start_run", "Record")),
    ]
    main = preloads(Target("module", "mmm.examples.fsdp_tp"))
    (names,) = (preload.names for preload in main if preload.module == "mmm.examples._support")
    assert {"start_run", "text_steps", "Record", "Agreement"} <= set(names)
