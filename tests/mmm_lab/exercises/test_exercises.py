"""Each exercise: the file that one begins with is told so, wrong answers are told apart, the right one passes."""

import re
import time
from pathlib import Path

import pytest

from mmm_lab.cli.main import main
from mmm_lab.exercises import NAMES
from mmm_lab.exercises.check import check_file, exercise, file_of
from support.answers import RIGHT, WRONG, wrong_answer
from support.clock import stretched

CASES = [(name, number) for name in NAMES for number in range(len(WRONG[name]))]


def write(folder, name, code):
    path = folder / f"{name}.py"
    path.write_text(f'EXERCISE = "{name}"\n{code}')
    return path


@pytest.mark.parametrize("name", NAMES)
def test_the_file_to_begin_with(name, tmp_path):
    path = tmp_path / "mmm" / "mine.py"
    path.parent.mkdir()
    path.write_text(file_of(name))
    result = check_file(path)
    assert not result.right
    assert result.text == f"nothing is written yet: write {exercise(name).FUNCTION}"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_s_answer_is_right(name, tmp_path):
    began = time.monotonic()
    result = check_file(write(tmp_path, name, RIGHT[name]))
    assert result.right, result.text
    assert time.monotonic() - began < stretched(60)  # 20 on a machine that does nothing else


@pytest.mark.long
@pytest.mark.parametrize(("name", "number"), CASES)
def test_wrong(name, number, tmp_path):
    code, says = wrong_answer(name, number)
    result = check_file(write(tmp_path, name, code))
    assert not result.right
    assert re.search(says, result.text), result.text


def test_wrong_answers_are_told_apart(tmp_path):
    said = {check_file(write(tmp_path, "column_row", wrong_answer("column_row", n)[0])).text for n in range(3)}
    assert len(said) == 3


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["exercise"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    assert main(["exercise", "start", "two_d"]) == 0
    assert main(["exercise", "check", "two_d.py"]) == 1
    assert "not yet" in capsys.readouterr().out
    assert main(["exercise", "check", str(write(tmp_path, "microbatches", RIGHT["microbatches"]))]) == 0
    assert capsys.readouterr().out.endswith("right\n")
    for wrong, says in (
        (["start", "two_d"], "two_d.py cannot be written: File exists"),
        (["start", "three_d"], "there is no such exercise"),
        (["check", "nowhere.py"], "cannot be read"),
    ):
        assert main(["exercise", *wrong]) == 2
        assert says in capsys.readouterr().err
    for code, says in (
        ("x = 1", "does not say which exercise it is"),
        ('EXERCISE = "two_d"\nx = (', "cannot be imported: SyntaxError"),
        ('EXERCISE = "two_d"\n', "has no function shard"),
    ):
        (tmp_path / "bad.py").write_text(code)
        assert main(["exercise", "check", "bad.py"]) == 2
        assert says in capsys.readouterr().err


def test_what_the_page_shows(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "exercises.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"\$ mmm exercise check column_row.py\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    begun = file_of("column_row")
    (tmp_path / "column_row.py").write_text(begun[: begun.index("def mlp")] + code)
    assert main(["exercise", "check", "column_row.py"]) == 1
    assert plain(capsys.readouterr().out) == plain(shown)


def plain(text):
    """Without what rounding decides."""
    return re.sub(r"\d(\.\d+)?e[+-]\d+", "…", text).strip()
