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
        ("-um t a", Target("module", "t", ("a",), ("-u",))),
        ("-mt", Target("module", "t")),
        ("-OO -W ignore t.py", Target("script", "t.py", (), ("-OO", "-W", "ignore"))),
        ("-c 1 a", Target("code", "1", ("a",))),
    ],
)
def test_words_after_python(words, expected):
    assert target.parse(["python3", *words.split()]) == expected
    assert target.parse([sys.executable, *words.split()]) == expected
    assert expected.line()[1:] == [*expected.flags, *expected.tail()]


@pytest.mark.parametrize("words", [["bash", "-c", "true"], ["./t.sh"], ["python3", "-V"], ["python3", "-i", "x"]])
def test_anything_else_is_executed_as_it_is(words):
    made = target.parse(words)
    assert not made.is_python
    assert made.line()[1:] == words[1:]


def test_first_on_the_path_as_python_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    assert Target("module", "m").first_path() == str(tmp_path)
    assert Target("script", "scripts/x.py").first_path() == str(tmp_path / "scripts")
    assert Target("code", "1").first_path() == ""
    assert Target("module", "m", flags=("-I",)).first_path() is None
    assert Target("module", "m", flags=("-X", "dev", "-WIgnore")).first_path() == str(tmp_path)


def refusal(*words):
    with pytest.raises(LaunchError) as caught:
        target.check(target.parse(words))
    return str(caught.value)


def test_scripts_and_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    target.check(target.parse(["python3", "train.py"]))
    target.check(target.parse(["true"]))
    assert "Did you mean trian.py" not in refusal("python3", "trian.py")
    assert "Did you mean train.py?" in refusal("python3", "trian.py")
    assert str(tmp_path) in refusal("python3", "other.py")
    assert "without a __main__.py" in refusal("python3", "folder")
    assert "launch python3 ./train.py" in refusal("./train.py")
    assert "looked in every folder on PATH" in refusal("no-such-program")
    assert "there is no such file" in refusal("./no-such-program")
    assert "launch python3 -m train" in refusal("train")
    assert "no module and no script" in refusal("python3")
