"""The pictures of docs/pictures are those that their commands draw: docs/pictures/commands.txt has a line each,
``name.svg: mmm draw …``. So is the guide's picture of trees. MMM_WRITE_DOCS=1 draws them anew."""

import os
import runpy
import shlex

import pytest

from mmm_lab.cli.main import main as mmm
from support.console import WRITE
from support.pages import DOCS, ROOT

FOLDER = DOCS / "pictures"
LIST = FOLDER / "commands.txt"
LINES = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
PICTURES = dict(line.split(": ", 1) for line in LINES if line and not line.startswith("#"))


def test_each_has_a_command():
    drawn = {path.name for path in FOLDER.glob("*.svg")}
    assert drawn <= PICTURES.keys()
    assert os.environ.get(WRITE) or drawn == PICTURES.keys()


@pytest.mark.docs
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_command_draws(name, tmp_path, monkeypatch):
    argv = shlex.split(PICTURES[name])
    assert argv[:2] == ["mmm", "draw"]
    monkeypatch.chdir(tmp_path)
    assert mmm([*argv[1:], "--out", name]) == 0
    drawn = (tmp_path / name).read_bytes()
    if os.environ.get(WRITE):
        (FOLDER / name).write_bytes(drawn)
    assert (FOLDER / name).read_bytes() == drawn


@pytest.mark.docs
def test_the_picture_of_trees_is_what_its_script_draws(tmp_path, monkeypatch):
    picture = DOCS / "guide" / "curves" / "same-bits.svg"
    out = picture if os.environ.get(WRITE) else tmp_path / picture.name
    monkeypatch.setattr("sys.argv", ["guide_tree.py", "--out", str(out)])
    runpy.run_path(str(ROOT / "benchmarks" / "guide_tree.py"), run_name="__main__")
    assert picture.read_bytes() == out.read_bytes()
