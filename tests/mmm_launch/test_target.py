"""CMD taken apart, and checked without importing it; what it imports is read from its source, and none of it runs."""

import sys

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.program import target
from mmm_launch.program.preloads import Preload, preloads
from mmm_launch.program.target import Target


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("-m pkg.train --lr 1", Target("module", "pkg.train", ("--lr", "1"))),
        ("train.py -m x", Target("script", "train.py", ("-m", "x"))),
        ("-u -X dev -Wignore -m t", Target("module", "t", (), ("-u", "-X", "dev", "-Wignore"))),
        ("-OO -W ignore t.py", Target("script", "t.py", (), ("-OO", "-W", "ignore"))),
        ("-c 1 a", Target("code", "1", ("a",))),
    ],
)
def test_words_after_python(argv, expected):
    assert target.parse(["python3", *argv.split()]) == expected
    assert target.parse([sys.executable, *argv.split()]) == expected
    assert expected.line()[1:] == [*expected.flags, *expected.tail()]


@pytest.mark.parametrize("line", ["bash -c true", "./t.sh", "python3 -V", "python3 -i x", "python3 -um t"])
def test_anything_else_is_executed_as_it_is(line):
    argv = line.split()
    made = target.parse(argv)
    assert not made.is_python
    assert made.line()[1:] == argv[1:]


def refusal(*argv):
    with pytest.raises(LaunchError) as caught:
        target.check(target.parse(argv))
    return str(caught.value)


def test_modules_are_checked_without_importing_their_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg/space/inner").mkdir(parents=True)
    (tmp_path / "pkg/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pkg/train.py").write_text("")
    (tmp_path / "pkg/space/inner/run.py").write_text("")
    target.check(target.parse(["python3", "-m", "pkg.train"]))
    # Folders without __init__.py.
    target.check(target.parse(["python3", "-m", "pkg.space.inner.run"]))
    assert "'pkg.trian'" in refusal("python3", "-m", "pkg.trian")
    assert "package without a __main__" in refusal("python3", "-m", "pkg")
    assert "'pkg.train.x'" in refusal("python3", "-m", "pkg.train.x")
    assert "'nothing.at.all'" in refusal("python3", "-m", "nothing.at.all")
    assert "'pkg/train.py'" in refusal("python3", "-m", "pkg/train.py")
    (tmp_path / "pkg/__init__.py").write_text("__path__.append('/elsewhere')")
    # Only python can know.
    target.check(target.parse(["python3", "-m", "pkg.made_later"]))


def test_scripts_and_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    target.check(target.parse(["python3", "train.py"]))
    target.check(target.parse(["true"]))
    assert "trian.py" in refusal("python3", "trian.py")
    assert str(tmp_path) in refusal("python3", "other.py")
    assert "folder/__main__.py" in refusal("python3", "folder")
    assert "launch python3 ./train.py" in refusal("./train.py")
    assert "PATH" in refusal("no-such-program")
    assert "./no-such-program" in refusal("./no-such-program")
    assert "launch python3 -m train" in refusal("train")
    assert "no module and no script" in refusal("python3")


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
    # a circle
    project("pkg/model.py", "import numpy\nfrom pkg import train\n" + BOMB)
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
    import yaml
""",
    )
    assert names(Target("script", "local.py")) == ["typing", "numpy", "rich", "yaml"]


def test_missing_modules_and_broken_sources_are_left_to_the_target(project):
    project("local.py", "import local_broken, local_missing.x\nimport numpy\n")
    project("local_broken.py", "def (:\n")
    assert names(Target("script", "local.py")) == ["numpy"]
    assert names(Target("script", "local_broken.py")) == []
    assert names(Target("module", "local_absent")) == []


def test_names_that_a_package_of_ours_imports_later_are_asked_for(project):
    project("tool.py", "def start_run(): pass\n")
    text = "from mmm.examples import _support as example\nimport tool\nprint(example.start_run, tool.start_run)\n"
    project("local.py", text + "def train():\n    return example.text_steps()\n" + BOMB)
    assert preloads(Target("script", "local.py")) == [
        Preload("mmm.examples", ("_support",)),
        Preload("mmm.examples._support", ("start_run", "text_steps")),
    ]
    main = preloads(Target("module", "mmm.examples.fsdp_tp"))
    (names,) = (preload.names for preload in main if preload.module == "mmm.examples._support")
    assert {"start_run", "text_steps", "resolve_own"} <= set(names)
