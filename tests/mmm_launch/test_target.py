"""CMD taken apart, and checked without importing it."""

import sys

import pytest

from mmm_launch.errors import LaunchError
from mmm_launch.program import target
from mmm_launch.program.target import Target


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m pkg.train --lr 1", Target("module", "pkg.train", ("--lr", "1"))),
        ("train.py -m x", Target("script", "train.py", ("-m", "x"))),
        ("-u -X dev -Wignore -m t", Target("module", "t", (), ("-u", "-X", "dev", "-Wignore"))),
        ("-OO -W ignore t.py", Target("script", "t.py", (), ("-OO", "-W", "ignore"))),
        ("-c 1 a", Target("code", "1", ("a",))),
    ],
)
def test_words_after_python(words, expected):
    assert target.parse(["python3", *words.split()]) == expected
    assert target.parse([sys.executable, *words.split()]) == expected
    assert expected.line()[1:] == [*expected.flags, *expected.tail()]


@pytest.mark.parametrize("line", ["bash -c true", "./t.sh", "python3 -V", "python3 -i x", "python3 -um t"])
def test_anything_else_is_executed_as_it_is(line):
    words = line.split()
    made = target.parse(words)
    assert not made.is_python
    assert made.line()[1:] == words[1:]


def refusal(*words):
    with pytest.raises(LaunchError) as caught:
        target.check(target.parse(words))
    return str(caught.value)


def test_modules_are_checked_without_importing_their_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg/space/inner").mkdir(parents=True)
    (tmp_path / "pkg/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "pkg/train.py").write_text("")
    (tmp_path / "pkg/space/inner/run.py").write_text("")
    target.check(target.parse(["python3", "-m", "pkg.train"]))
    target.check(target.parse(["python3", "-m", "pkg.space.inner.run"]))  # folders without __init__.py
    assert "'pkg.trian'" in refusal("python3", "-m", "pkg.trian")
    assert "package without a __main__" in refusal("python3", "-m", "pkg")
    assert "'pkg.train.x'" in refusal("python3", "-m", "pkg.train.x")
    assert "'nothing.at.all'" in refusal("python3", "-m", "nothing.at.all")
    assert "'pkg/train.py'" in refusal("python3", "-m", "pkg/train.py")
    (tmp_path / "pkg/__init__.py").write_text("__path__.append('/elsewhere')")
    target.check(target.parse(["python3", "-m", "pkg.made_later"]))  # only python can know


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
